"""Loading a checkpoint: bad input is named before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_vcpo.checkpoint.load_hf import check_hf_folder, load_hf_checkpoint
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.models.naming import ModelShape, family_by_name
from tests.oracle.model_pairs import ALL_FAMILIES, VOCAB, gpt_models, save_hf_model, transformer_config


def load(folder: Path, *, tied: bool = True, name: str = "llama", **changes: Any) -> Any:
    """Load into a fresh model; returns it. On failure its parameters must be untouched."""
    config = transformer_config(name, **changes)
    chunks = gpt_models(config, tied=tied)
    shape = ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=128, tied_embeddings=tied)
    before = {key: p.clone() for key, p in chunks[0].named_parameters()}
    try:
        load_hf_checkpoint(chunks, family_by_name(name), shape, folder)
    except CheckpointError:
        assert all(torch.equal(p, before[key]) for key, p in chunks[0].named_parameters())
        raise
    return chunks[0]


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; '__' in a name stands for '.'."""
    path = folder / "model.safetensors"
    state: dict[str, Any] = load_file(path) | {key.replace("__", "."): tensor for key, tensor in tensors.items()}
    save_file({key: tensor for key, tensor in state.items() if tensor is not None}, path)


@pytest.fixture
def checkpoint(tmp_path: Path, megatron_groups: Any) -> Path:
    save_hf_model(tmp_path, "llama", tied=True)
    return tmp_path


def test_missing_folder_and_missing_files_give_one_sentence(tmp_path: Path, megatron_groups: Any) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


def test_a_truncated_file_is_named(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
        load(checkpoint)


def test_missing_unknown_and_misshapen_tensors_are_all_listed(checkpoint: Path) -> None:
    edit(
        checkpoint,
        model__norm__weight=None,
        model__layers__0__self_attn__q_proj__bias=torch.zeros(32),
        model__layers__1__mlp__up_proj__weight=torch.zeros(40, 32),
        model__layers__1__mlp__down_proj__weight=torch.zeros(32, 48, dtype=torch.int8),
    )
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    message = str(caught.value)
    assert "lacks model.norm.weight" in message
    assert "also holds model.layers.0.self_attn.q_proj.bias" in message
    assert "up_proj.weight is (40, 32), the model needs (48, 32)" in message
    assert "down_proj.weight is not stored as floating point" in message


def test_multi_token_prediction_layers_are_refused_by_name(checkpoint: Path) -> None:
    edit(
        checkpoint,
        model__layers__2__eh_proj__weight=torch.zeros(32, 64),
        model__layers__2__enorm__weight=torch.ones(32),
    )
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    assert "holds model.layers.2 beyond the 2 layers" in str(caught.value)
    assert "multi-token-prediction" in str(caught.value)
    assert "eh_proj" not in str(caught.value)


def test_a_model_of_another_family_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"q_norm\.weight"):
        load(checkpoint, name="qwen3")


def test_an_output_layer_stored_beside_tied_embeddings_has_to_be_equal(checkpoint: Path) -> None:
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    edit(checkpoint, lm_head__weight=embedding.clone())
    load(checkpoint)
    edit(checkpoint, lm_head__weight=embedding + 1)
    with pytest.raises(CheckpointError, match="--untie-embeddings-and-output-weights"):
        load(checkpoint)


def test_rotary_buffers_of_old_checkpoints_are_ignored(checkpoint: Path) -> None:
    edit(checkpoint, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load(checkpoint)


def test_types_are_converted_and_values_beyond_the_type_are_refused(checkpoint: Path) -> None:
    half = torch.float16
    model = load(checkpoint, params_dtype=half)
    saved = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.embedding.word_embeddings.weight[:VOCAB], saved.to(half))
    edit(checkpoint, model__layers__1__mlp__down_proj__weight=torch.full((32, 48), 1e5))
    config = transformer_config("llama", params_dtype=half)
    shape = ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=128, tied_embeddings=True)
    with pytest.raises(CheckpointError, match=r"linear_fc2\.weight, loaded as torch\.float16"):
        load_hf_checkpoint(gpt_models(config, tied=True), family_by_name("llama"), shape, checkpoint)


def test_a_model_beside_the_one_in_shards_is_refused(checkpoint: Path) -> None:
    hf = save_hf_model(checkpoint, "llama", tied=True)
    stale = (checkpoint / "model.safetensors").read_bytes()
    hf.save_pretrained(checkpoint / "sharded", max_shard_size="20KB")
    (checkpoint / "sharded" / "model.safetensors").write_bytes(stale)
    with pytest.raises(CheckpointError, match=r"two models: model\.safetensors.*remove the one that is stale"):
        check_hf_folder(checkpoint / "sharded")
    names = {"model.safetensors": sorted(load_file(checkpoint / "model.safetensors"))}
    index = {"weight_map": {name: file for file, listed in names.items() for name in listed}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    check_hf_folder(checkpoint)


def test_an_index_that_disagrees_with_its_files_is_refused(checkpoint: Path) -> None:
    hf = save_hf_model(checkpoint, "llama", tied=True)
    sharded = checkpoint / "sharded"
    hf.save_pretrained(sharded, max_shard_size="20KB")
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = sharded / content["weight_map"]["model.norm.weight"]
    file.rename(checkpoint / "moved")
    with pytest.raises(CheckpointError, match=rf"{file.name} is named by .* but does not exist"):
        load(sharded)
    (checkpoint / "moved").rename(file)
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"disagree about model\.norm\.weight"):
        load(sharded)
    for bad in (b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b'{"weight_map": null}', b"\xff{}"):
        index.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"not a safetensors index|it lacks"):
            load(sharded)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_a_whole_folder_passes_the_check_of_headers(name: str, tied: bool, tmp_path: Path) -> None:
    save_hf_model(tmp_path, name, tied=tied)
    check_hf_folder(tmp_path)


def test_headers_tell_what_is_missing_misshapen_or_quantized_without_a_model(tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama", tied=True)
    edit(tmp_path, lm_head__weight=torch.zeros(VOCAB, 32))  # tied: values are compared when the model is loaded
    check_hf_folder(tmp_path)
    for changes, said in (
        ({"model__norm__weight": None}, "it lacks model.norm.weight"),
        ({"model__norm__weight": torch.zeros(31)}, "model.norm.weight is (31,), the model needs (32,)"),
        ({"model__norm__weight": torch.zeros(32, dtype=torch.int8)}, "not stored as floating point"),
    ):
        edit(tmp_path, **changes)
        with pytest.raises(CheckpointError) as caught:
            check_hf_folder(tmp_path)
        assert said in str(caught.value)


def test_an_empty_checkpoint_is_a_short_sentence(tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama", tied=True)
    path = tmp_path / "model.safetensors"
    save_file({}, path)
    with pytest.raises(CheckpointError, match=r"it lacks model\.embed_tokens\.weight, .* and 15 more\."):
        check_hf_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match=r"is not a safetensors index: .*it names no tensor"):
        check_hf_folder(tmp_path)
