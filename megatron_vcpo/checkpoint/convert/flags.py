"""Megatron's flags for a checkpoint, to read or to use in a launch script, and a check that a model suits a layout."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_vcpo.checkpoint.hf_config import megatron_flags_for
from megatron_vcpo.models.description import ModelDescription
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.models.naming import NamingError, shard_shape

FLAGS_FILE = "megatron_flags.sh"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PRECISION = {torch.float16: ["--fp16"], torch.bfloat16: ["--bf16"]}


@dataclass(frozen=True, kw_only=True)
class TargetLayout:
    """Parallel sizes that a checkpoint is meant for. They are checked and printed; any other layout can load it too."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None  # None: Megatron's default, the tensor-parallel size

    def __post_init__(self) -> None:
        """Raise CheckpointError if a size is below 1."""
        expert_tensor = 1 if self.expert_tensor is None else self.expert_tensor
        if min(self.tensor, self.pipeline, self.expert, expert_tensor) < 1:
            raise CheckpointError("Every --target-...-parallel-size must be at least 1.")

    def check(self, model: ModelDescription, padded_vocab_size: int) -> None:
        """Raise CheckpointError, naming the flag to change, if the model does not divide over these sizes."""
        expert_tensor = self.tensor if self.expert_tensor is None else self.expert_tensor
        if model.num_layers % self.pipeline:
            raise CheckpointError(
                f"{model.num_layers} layers do not divide over --target-pipeline-parallel-size {self.pipeline}."
            )
        experts = model.num_experts
        if (self.expert > 1 or self.expert_tensor is not None) and not experts:
            raise CheckpointError("The model has no experts: drop --target-expert-parallel-size and its like.")
        if experts and experts % self.expert:
            raise CheckpointError(f"{experts} experts do not divide over --target-expert-parallel-size {self.expert}.")
        if model.num_heads % self.tensor:
            raise CheckpointError(
                f"{model.num_heads} attention heads do not divide over --target-tensor-parallel-size {self.tensor}."
            )
        shape = model.shape(padded_vocab_size)
        for spec in model.family.parameters(shape):
            dense = spec.expert is None
            try:
                shard_shape(spec, shape, self.tensor if dense else expert_tensor)
            except NamingError as error:
                flag = f"--target-{'' if dense else 'expert-'}tensor-parallel-size"
                raise CheckpointError(f"{str(error).partition(';')[0]}; change {flag}.") from error

    def flags(self) -> list[str]:
        """Megatron's flags for the sizes above 1."""
        named = (
            ("--tensor-model-parallel-size", self.tensor),
            ("--pipeline-model-parallel-size", self.pipeline),
            ("--expert-model-parallel-size", self.expert),
        )
        flags = [word for flag, size in named if size > 1 for word in (flag, str(size))]
        if self.expert_tensor is not None:
            flags += ["--expert-tensor-parallel-size", str(self.expert_tensor)]
        return flags


def model_flags(folder: str | Path, dtype: torch.dtype, layout: TargetLayout) -> list[str]:
    """Flags for the model in a folder's config.json: its sizes, the precision, and the vocabulary padded for a
    layout."""
    flags = megatron_flags_for(folder, tensor_model_parallel_size=layout.tensor)
    return [*flags, *_PRECISION.get(dtype, [])]


def script(arrays: Mapping[str, Sequence[str]]) -> str:
    """Bash arrays, a flag with its values on each line: `source` them and write "${MODEL_ARGS[@]}"."""
    lines = []
    for name, words in arrays.items():
        lines.append(f"{name}=(")
        row: list[str] = []
        for word in words:
            if word.startswith("--") and row:
                lines.append("    " + " ".join(row))
                row = []
            row.append(shlex.quote(word))
        lines += ["    " + " ".join(row)] if row else []
        lines.append(")")
    return "\n".join(lines) + "\n"
