"""The parameters that one rank holds, by their names in the whole model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_vcpo.models.naming.families import OUTPUT_LAYER
from megatron_vcpo.models.naming.rules import ParameterSpec
from megatron_vcpo.models.naming.shape import ModelShape, NamingError
from megatron_vcpo.models.naming.transform import shard_shape

# Transformer Engine fuses the norm into the linear layer after it and numbers grouped experts at the end of the name.
_TRANSFORMER_ENGINE = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r".input_layernorm.\1"),
    (
        re.compile(r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$"),
        r".self_attention.\1_layernorm.\2",
    ),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r".pre_mlp_layernorm.\1"),
    (re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$"), r".mlp.experts.local_experts.\3.\1.\2"),
)
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)$")
# The one kind of buffer that a checkpoint must hold; all other buffers follow from the configuration.
_BUFFER = re.compile(r"\.mlp\.router\.expert_bias$")
_SINKS = re.compile(r"\.core_attention\.softmax_offset$")
_EXPERT = re.compile(r"(\.mlp\.experts\.local_experts\.)(\d+)(\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """This rank's index in each model-parallel group, and the groups' sizes."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1

    @classmethod
    def of(cls, groups: Any | None) -> ParameterLayout:
        """Read ranks and sizes from a ProcessGroupCollection (its tp, pp, ep, expt_tp); None is a single process."""
        places: dict[str, int] = {}
        for field, attribute in (("tp", "tp"), ("pp", "pp"), ("ep", "ep"), ("expert_tp", "expt_tp")):
            group = getattr(groups, attribute, None)
            if group is not None:
                places |= {f"{field}_rank": group.rank(), f"{field}_size": group.size()}
        return cls(**places)

    @property
    def is_single(self) -> bool:
        """Whether this rank holds the whole model."""
        return self.tp_size == self.pp_size == self.ep_size == self.expert_tp_size == 1

    def tp_of(self, spec: ParameterSpec) -> tuple[int, int]:
        """(rank, size) in the tensor-parallel group that splits the parameter."""
        if spec.expert is None:
            return self.tp_rank, self.tp_size
        return self.expert_tp_rank, self.expert_tp_size


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while not hasattr(chunk, "decoder"):
        if not isinstance(getattr(chunk, "module", None), torch.nn.Module):
            raise NamingError(f"{type(chunk).__name__} is not a Megatron-Core GPTModel and holds none.")
        chunk = chunk.module
    return chunk


def local_parameters(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, layout: ParameterLayout
) -> dict[str, torch.Tensor]:
    """Parameters of this rank's model chunks by their whole-model name in the local layer spec's spelling.

    They include the router's bias, which Megatron keeps as a buffer.
    """
    found: dict[str, torch.Tensor] = {}
    experts_here = shape.num_experts // layout.ep_size
    for chunk in map(unwrap, chunks):
        # layer_number counts from 1 over the whole model, whatever the pipeline layout
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        buffers = ((raw, buffer) for raw, buffer in chunk.named_buffers() if _BUFFER.search(raw))
        for raw, parameter in itertools.chain(chunk.named_parameters(), buffers):
            name = _whole_model_name(raw, numbers, layout.ep_rank * experts_here)
            if name in found:
                raise NamingError(f"Two parameters of this rank are called {name}.")
            # Transformer Engine keeps the sinks as [1, heads, 1, 1]
            found[name] = parameter.detach().view(-1) if _SINKS.search(name) else parameter
    return found


def _whole_model_name(name: str, layer_numbers: Sequence[int], first_expert: int) -> str:
    for pattern, replacement in _TRANSFORMER_ENGINE:
        name = pattern.sub(replacement, name)
    name = _LAYER.sub(lambda m: f"{m[1]}{layer_numbers[int(m[2])]}{m[3]}", name)
    return _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first_expert}{m[3]}", name)


def is_tied_copy(name: str, shape: ModelShape) -> bool:
    """Whether the parameter is the last pipeline stage's copy of tied embeddings."""
    return shape.tied_embeddings and name == OUTPUT_LAYER


def local_problems(
    local: Mapping[str, torch.Tensor], specs: Mapping[str, ParameterSpec], shape: ModelShape, layout: ParameterLayout
) -> list[str]:
    """A sentence for each parameter of this rank that the table lacks or gives another shape; empty if there are
    none."""
    unknown = sorted(name for name in local if name not in specs and not is_tied_copy(name, shape))
    problems = [f"parameters the table does not know: {', '.join(unknown)}"] if unknown else []
    for name, parameter in local.items():
        if (spec := specs.get(name)) is None:
            continue
        expected = shard_shape(spec, shape, layout.tp_of(spec)[1])
        if tuple(parameter.shape) != expected:
            problems.append(f"{name} is {tuple(parameter.shape)} on this rank, expected {expected}")
        if not parameter.dtype.is_floating_point or parameter.element_size() < 2:
            problems.append(f"{name} is {parameter.dtype}; only fp32, fp16 and bf16 parameters can be read")
    return problems
