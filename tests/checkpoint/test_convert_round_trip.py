"""Hugging Face -> Megatron's torch_dist -> Hugging Face: the same bits, the same logits, in every family."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_vcpo.checkpoint.convert.command import options_of
from megatron_vcpo.checkpoint.convert.compare import compare, compare_logits
from megatron_vcpo.checkpoint.convert.flags import TargetLayout
from megatron_vcpo.checkpoint.convert.source import HuggingFaceSource, MegatronSource
from megatron_vcpo.checkpoint.convert.to_hf import convert_to_hf
from megatron_vcpo.checkpoint.convert.to_megatron import ConversionOptions, convert_to_megatron
from megatron_vcpo.checkpoint.hf_config import megatron_flags_for
from megatron_vcpo.checkpoint.torch_dist import TorchDistFolder
from megatron_vcpo.models.building.offline import args_from_flags, build_model
from megatron_vcpo.models.building.rotary import check_rotary
from megatron_vcpo.models.description import describe_hf
from megatron_vcpo.models.errors import CheckpointError
from tests.oracle.model_pairs import ALL_FAMILIES, VOCAB, save_hf_model

pytestmark = pytest.mark.slow

CASES = [(name, name not in ("llama", "qwen3_moe", "gpt_oss")) for name in ALL_FAMILIES] + [("llama", True)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def to_megatron(source: Path, target: Path, **options: Any) -> Path:
    convert_to_megatron(source, target, ConversionOptions(**({"shard_bytes": 20_000} | options))).folder.commit()
    return target


def to_hf(source: Path, target: Path, **options: Any) -> Path:
    convert_to_hf(
        MegatronSource(source), target, ConversionOptions(**({"shard_bytes": 20_000} | options))
    ).folder.commit()
    return target


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_a_model_comes_back_bit_for_bit_and_computes_the_same(
    name: str, tied: bool, tmp_path: Path, megatron_groups: Any
) -> None:
    hf = save_hf_model(tmp_path / "hf", name, tied=tied)
    megatron = to_megatron(tmp_path / "hf", tmp_path / "megatron")
    # one key for each layer, whatever --moe-layer-freq will be
    assert any(key.startswith("decoder.layers.1.") for key in TorchDistFolder(megatron).tensors)
    back = to_hf(megatron, tmp_path / "back")
    before, after = tensors(tmp_path / "hf"), tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)

    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    assert {file: set(load_file(back / file)) for file in set(index["weight_map"].values())} == {
        file: {key for key, place in index["weight_map"].items() if place == file}
        for file in set(index["weight_map"].values())
    }
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    loaded = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, hf(tokens).logits, rtol=0, atol=0)

    a, b = HuggingFaceSource(tmp_path / "hf"), MegatronSource(megatron)
    assert a.description == b.description
    gap = compare_logits(a, b)  # Megatron loads it by dist_checkpointing and agrees with transformers
    assert gap.same
    assert gap.scale > 0.5


def test_every_parameter_is_stored_once_and_norms_under_transformer_engines_names_too(
    tmp_path: Path, megatron_groups: Any
) -> None:
    save_hf_model(tmp_path / "hf", "qwen3_moe", tied=False)
    folder = TorchDistFolder(to_megatron(tmp_path / "hf", tmp_path / "megatron"))
    keys = set(folder.tensors)
    # local layer spec: layer 0 is dense, layer 1 holds experts
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in keys
    assert "decoder.layers.0.pre_mlp_layernorm.weight" not in keys
    norm = torch.equal(
        folder.read("decoder.layers.1.pre_mlp_layernorm.weight", (0,), (32,)),
        folder.read("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", (0,), (32,)),
    )
    assert norm
    stored = folder._reader.read_metadata().state_dict_metadata  # extra state that Transformer Engine insists on
    for module in ("layers.1.pre_mlp_layernorm", "layers.0.self_attention.q_layernorm", "final_layernorm"):
        assert f"decoder.{module}._extra_state/shard_0_1" in stored
    experts = folder.tensors["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"]
    assert tuple(experts.size) == (4, 48, 32)
    assert sorted(tuple(chunk.offsets) for chunk in experts.chunks) == [
        (e, half, 0) for e in range(4) for half in (0, 24)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_type_rounds_each_value_once(dtype: torch.dtype, tmp_path: Path, megatron_groups: Any) -> None:
    save_hf_model(tmp_path / "hf", "qwen2", tied=True)
    megatron = to_megatron(tmp_path / "hf", tmp_path / "megatron", dtype=dtype)
    back = to_hf(megatron, tmp_path / "back")  # in the type that is stored
    before, after = tensors(tmp_path / "hf"), tensors(back)
    assert all(torch.equal(before[key].to(dtype), after[key]) for key in before)
    assert all(tensor.dtype == dtype for tensor in after.values())
    assert json.loads((back / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    ledger = compare(HuggingFaceSource(tmp_path / "hf"), MegatronSource(megatron))
    assert ledger.same
    assert ledger.rounded == len(before)
    assert compare_logits(HuggingFaceSource(tmp_path / "hf"), MegatronSource(megatron), dtype=dtype).same
    wide = to_hf(megatron, tmp_path / "wide", dtype=torch.float32)
    assert all(torch.equal(before[key].to(dtype).float(), tensor) for key, tensor in tensors(wide).items())


@pytest.mark.parametrize(("value", "said"), [(1e5, "more than torch.float16 can"), (float("nan"), "not finite")])
def test_a_value_that_does_not_fit_is_named_and_nothing_is_published(
    value: float, said: str, tmp_path: Path, megatron_groups: Any
) -> None:
    save_hf_model(tmp_path / "hf", "llama", tied=True)
    state = load_file(tmp_path / "hf" / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"][3, 4] = value
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=said) as caught:
        to_megatron(tmp_path / "hf", tmp_path / "megatron", dtype=torch.float16)
    assert "model.layers.1.mlp.down_proj.weight" in str(caught.value)
    assert not (tmp_path / "megatron").exists()


def test_the_flags_can_be_sourced_and_build_the_model(tmp_path: Path, megatron_groups: Any) -> None:
    save_hf_model(tmp_path / "hf", "qwen3_moe", tied=True)
    layout = TargetLayout(tensor=2, pipeline=2, expert=4, expert_tensor=1)
    megatron = to_megatron(tmp_path / "hf", tmp_path / "meg atron", layout=layout, dtype=torch.bfloat16)
    arrays = '"${MODEL_ARGS[@]}" -- "${PARALLEL_ARGS[@]}" "${LOAD_ARGS[@]}"'
    show = f'. "{megatron}/megatron_flags.sh"; printf "%s\\n" {arrays}'
    words = subprocess.run(["bash", "-euc", show], capture_output=True, text=True, check=True).stdout.splitlines()
    model, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    assert model == [*megatron_flags_for(tmp_path / "hf", tensor_model_parallel_size=2), "--bf16"]
    assert rest == [
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
        *("--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1", "--load", str(megatron)),
    ]
    assert MegatronSource(megatron).padded_vocab_size == 256  # 101 tokens, padded to 128 on each of two ranks


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor": 3}, "4 attention heads do not divide over --target-tensor-parallel-size 3"),
        ({"pipeline": 3}, "2 layers do not divide over --target-pipeline-parallel-size 3"),
        ({"expert": 3}, "4 experts do not divide over --target-expert-parallel-size 3"),
        ({"expert_tensor": 5}, "--target-expert-tensor-parallel-size"),
        ({"tensor": 0}, "at least 1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_its_flag(
    sizes: dict[str, int], said: str, tmp_path: Path, megatron_groups: Any
) -> None:
    save_hf_model(tmp_path, "qwen3_moe", tied=True)
    with pytest.raises(CheckpointError, match=said):
        TargetLayout(**sizes).check(HuggingFaceSource(tmp_path).description, 384)


def saved_by_megatron(folder: Path, hf: Path, content: dict[str, Any], rename: dict[str, str] | None = None) -> Path:
    """A checkpoint of the model that Megatron's own strategy writes, some keys renamed."""
    from megatron.core import dist_checkpointing

    args = args_from_flags(megatron_flags_for(hf))
    model = build_model(args, weights=True)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(number))
    state = model.sharded_state_dict(metadata=dict(content))
    for entry in state.values():
        entry.key = (rename or {}).get(entry.key, entry.key)
    folder.mkdir()
    dist_checkpointing.save({"model": state, "args": args, "iteration": 7}, str(folder), content_metadata=content)
    return folder


def assert_holds(source: MegatronSource, hf: Path) -> None:
    """The source's parameters are those that `saved_by_megatron` made."""
    model = build_model(args_from_flags(megatron_flags_for(hf)), weights=False)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        expected = torch.empty(parameter.shape).normal_(generator=torch.Generator().manual_seed(number))
        spec = next(spec for spec in source.specs if spec.name == name)
        assert torch.equal(source.parameter(spec), expected), name


def test_one_tensor_for_all_layers_and_one_key_for_each_are_both_read(tmp_path: Path, megatron_groups: Any) -> None:
    """What training writes for layers that are all alike, and for others."""
    hf = tmp_path / "hf"
    save_hf_model(hf, "mixtral", tied=False)
    together = MegatronSource(saved_by_megatron(tmp_path / "together", hf, {"singleton_local_shards": False}))
    apart = MegatronSource(saved_by_megatron(tmp_path / "apart", hf, {"singleton_local_shards": True}))
    assert "decoder.layers.mlp.router.weight" in TorchDistFolder(tmp_path / "together").tensors
    assert "decoder.layers.1.mlp.router.weight" in TorchDistFolder(tmp_path / "apart").tensors
    assert_holds(together, hf)
    assert_holds(apart, hf)


def test_names_of_transformer_engine_are_read(tmp_path: Path, megatron_groups: Any) -> None:
    hf = tmp_path / "hf"
    save_hf_model(hf, "deepseek_v3", tied=False)
    rename = {"decoder.layers.1.mlp.linear_fc1.layer_norm_weight": "decoder.layers.1.pre_mlp_layernorm.weight"}
    for layer in range(2):
        attention = f"decoder.layers.{layer}.self_attention"
        rename[f"{attention}.linear_qkv.layer_norm_weight"] = f"decoder.layers.{layer}.input_layernorm.weight"
        for latent in ("q", "kv"):
            rename[f"{attention}.{latent}_layernorm.weight"] = f"{attention}.linear_{latent}_up_proj.layer_norm_weight"
    source = MegatronSource(saved_by_megatron(tmp_path / "te", hf, {}, rename))
    assert set(rename.values()) <= set(TorchDistFolder(tmp_path / "te").tensors)
    assert_holds(source, hf)


def test_a_checkpoint_of_another_model_is_refused_by_its_tensors(tmp_path: Path, megatron_groups: Any) -> None:
    save_hf_model(tmp_path / "hf", "llama", tied=True)
    rename = {"decoder.layers.1.mlp.linear_fc2.weight": "decoder.layers.1.mlp.adapter.weight"}
    content = {"non_homogeneous_layers": True}
    saved_by_megatron(tmp_path / "other", tmp_path / "hf", content, rename)
    with pytest.raises(CheckpointError) as caught:
        MegatronSource(tmp_path / "other")
    assert "it lacks decoder.layers.1.mlp.linear_fc2.weight" in str(caught.value)
    assert "it also holds decoder.layers.1.mlp.adapter.weight" in str(caught.value)


def test_incomplete_and_missing_checkpoints_give_one_sentence(tmp_path: Path, megatron_groups: Any) -> None:
    save_hf_model(tmp_path / "hf", "llama", tied=True)
    folder = to_megatron(tmp_path / "hf", tmp_path / "megatron")
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        TorchDistFolder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no Megatron checkpoint"):
        TorchDistFolder(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"iter_0000005 is missing.*--step"):
        TorchDistFolder(folder, step=5)
    file = folder / "release" / "__0_1.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-50])
    with pytest.raises(CheckpointError, match=r"__0_1\.distcp has \d+ bytes of"):
        TorchDistFolder(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_1\.distcp is missing"):
        TorchDistFolder(folder)
    file.write_bytes(bytes(len(content)))
    with pytest.raises(CheckpointError, match=r"__0_1\.distcp is damaged: its checksum is"):
        TorchDistFolder(folder)
    (folder / "release" / "vcpo_checksums.json").unlink()
    source = MegatronSource(folder)
    with pytest.raises(CheckpointError, match=r"cannot be read from"):
        [source.parameter(spec) for spec in source.specs]


def test_without_target_sizes_experts_follow_megatrons_default() -> None:
    arguments = argparse.Namespace(
        dtype=None,
        shard_size=1,
        overwrite=False,
        target_tensor_parallel_size=2,
        target_pipeline_parallel_size=1,
        target_expert_parallel_size=1,
        target_expert_tensor_parallel_size=None,
    )
    assert options_of(arguments).layout.flags() == ["--tensor-model-parallel-size", "2"]


def test_the_rebuilt_model_rotates_by_the_checkpoints_angles(tmp_path: Path, megatron_groups: Any) -> None:
    """Short prompts would hardly show a wrong scaling factor."""
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5000.0,
    }
    save_hf_model(tmp_path / "hf", "llama", tied=True, max_position_embeddings=16384, rope_parameters=scaling)
    source = MegatronSource(to_megatron(tmp_path / "hf", tmp_path / "megatron"))
    check_rotary([source.load_model()], describe_hf(tmp_path / "hf"))
    config = json.loads((to_hf(tmp_path / "megatron", tmp_path / "back") / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 32.0
