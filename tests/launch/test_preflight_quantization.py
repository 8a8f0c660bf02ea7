"""A quantized folder in the right place passes before anything starts; in a wrong one the flag is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_vcpo.models.description.hf import describe_hf
from tests.oracle.command_line import CommandLine

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 99,
}
_EIGHT_BITS = {"num_bits": 8, "type": "int"}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"weights": _EIGHT_BITS | {"strategy": "channel"}, "input_activations": _EIGHT_BITS}},
}
NAME = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch)


def folder(path: Path, quantization: dict[str, Any] | None = None, **changes: Any) -> str:
    """A model folder, quantized in one matrix where it is asked for."""
    path.mkdir()
    config = TINY | changes | ({"quantization_config": quantization} if quantization else {})
    (path / "config.json").write_text(json.dumps(config))
    model = describe_hf(path)
    shapes = dict(pair for spec in model.family.parameters(model.shape(model.vocab_size)) for pair in spec.hf)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    if quantization:
        tensors |= {
            f"{NAME}.weight": torch.zeros(64, 64, dtype=torch.int8),
            f"{NAME}.weight_scale": torch.ones(64, 1),
            f"{NAME}.input_scale": torch.ones(1),
        }
    save_file(tensors, path / "model.safetensors")
    return str(path)


def test_a_quantized_folder_of_the_same_model_passes(command_line: CommandLine, tmp_path: Path) -> None:
    _, config = command_line.check("--rollout-engine-quantization", folder(tmp_path / "int8", INT8))
    assert config.rollout.engine_quantization == str(tmp_path / "int8")


@pytest.mark.parametrize(
    ("quantization", "changes", "words"),
    [
        (None, {}, "describes no quantized checkpoint"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, "use fp8 or int8"),
        (INT8 | {"config_groups": {}}, {}, "has no config_groups"),
        (INT8, {"num_hidden_layers": 3}, "num_layers is 2, the checkpoint's 3"),
    ],
    ids=["plain", "four bits", "no groups", "another model"],
)
def test_another_folder_is_refused(
    command_line: CommandLine,
    tmp_path: Path,
    quantization: dict[str, Any] | None,
    changes: dict[str, Any],
    words: str,
) -> None:
    path = folder(tmp_path / "folder", quantization, **changes)
    sentence = command_line.refusal("--rollout-engine-quantization", path)
    assert sentence.startswith("--rollout-engine-quantization: ")
    assert words in sentence


def test_training_does_not_start_from_a_quantized_folder(command_line: CommandLine, tmp_path: Path) -> None:
    sentence = command_line.refusal("--vcpo-load-hf", folder(tmp_path / "int8", INT8))
    assert "is quantized" in sentence
    assert "--rollout-engine-quantization" in sentence


def test_an_engine_process_of_its_own_is_refused(command_line: CommandLine, tmp_path: Path) -> None:
    path = folder(tmp_path / "int8", INT8)
    sentence = command_line.refusal("--rollout-engine-quantization", path, "--rollout-engine-placement", "process")
    assert "--rollout-engine-placement colocated" in sentence
