"""transformers -> Megatron -> transformers: the same logits on the way, the same bits at the end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_vcpo.checkpoint.load_hf import load_hf_checkpoint
from megatron_vcpo.sync.gather import WeightGatherer
from megatron_vcpo.sync.naming import ModelShape, family_by_name
from tests.oracle.model_pairs import FAMILY_NAMES, VOCAB, gpt_models, save_hf_model, transformer_config


def build(name: str, *, tied: bool, rope: dict[str, Any] | None = None, **changes: Any) -> tuple[list[Any], ModelShape]:
    config = transformer_config(name, **changes)
    chunks = gpt_models(config, tied=tied, rope=rope)
    shape = ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=128, tied_embeddings=tied)
    return chunks, shape


def logits(chunk: Any, tokens: torch.Tensor) -> torch.Tensor:
    batch, length = tokens.shape
    causal = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    with torch.no_grad():
        return chunk(tokens, torch.arange(length).expand(batch, length), causal)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_checkpoint_computes_the_same_in_megatron_and_comes_back_bit_for_bit(
    name: str, tied: bool, tmp_path: Path, megatron_groups: Any
) -> None:
    hf = save_hf_model(tmp_path, name, tied=tied)
    chunks, shape = build(name, tied=tied)
    load_hf_checkpoint(chunks, family_by_name(name), shape, tmp_path, megatron_groups)

    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = hf(tokens).logits
    torch.testing.assert_close(logits(chunks[0], tokens)[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)

    gatherer = WeightGatherer(chunks, family_by_name(name), shape, megatron_groups, dtype=torch.float32)
    streamed = {key: tensor.clone() for key, tensor in gatherer.stream()}
    saved = load_file(tmp_path / "model.safetensors")
    assert streamed.keys() == saved.keys()
    assert list(streamed) == gatherer.names
    assert all(torch.equal(streamed[key], saved[key]) for key in saved)
    assert gatherer.nbytes == sum(tensor.nbytes for tensor in saved.values())


def test_llama_3_rope_scaling_computes_the_same(tmp_path: Path, megatron_groups: Any) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5000.0,
    }
    hf = save_hf_model(tmp_path, "llama", tied=False, max_position_embeddings=16384, rope_parameters=scaling)
    chunks, shape = build("llama", tied=False, rope={"rope_scaling": True, "rope_scaling_factor": 4.0})
    load_hf_checkpoint(chunks, family_by_name("llama"), shape, tmp_path, megatron_groups)
    tokens = torch.randint(0, VOCAB, (1, 120), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = hf(tokens).logits
    torch.testing.assert_close(logits(chunks[0], tokens)[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)
    plain, _ = build("llama", tied=False)
    load_hf_checkpoint(plain, family_by_name("llama"), shape, tmp_path, megatron_groups)
    assert not torch.allclose(logits(plain[0], tokens)[..., :VOCAB], expected, atol=1e-3)


def test_padded_vocabulary_rows_are_zero_after_loading(tmp_path: Path, megatron_groups: Any) -> None:
    save_hf_model(tmp_path, "llama", tied=True)
    chunks, shape = build("llama", tied=True)
    load_hf_checkpoint(chunks, family_by_name("llama"), shape, tmp_path, megatron_groups)
    assert not chunks[0].embedding.word_embeddings.weight[VOCAB:].any()


def test_sharded_checkpoints_load_like_single_files(tmp_path: Path, megatron_groups: Any) -> None:
    hf = save_hf_model(tmp_path / "one", "llama", tied=False)
    hf.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    loaded = []
    for folder in ("one", "many"):
        chunks, shape = build("llama", tied=False)
        load_hf_checkpoint(chunks, family_by_name("llama"), shape, tmp_path / folder, megatron_groups)
        loaded.append(copy.deepcopy(chunks[0].state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(*(d.values() for d in loaded)) if torch.is_tensor(a))
