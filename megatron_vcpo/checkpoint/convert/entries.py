"""How Megatron's dist_checkpointing stores each parameter of a model: keys, offsets, splits.

Megatron itself tells: we ask a GPTModel without memory for its weights for its sharded state dict. A checkpoint's
global tensors do not depend on the layout over ranks, so the model of a single process describes them all.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.models.match import match_model
from megatron_vcpo.models.naming import ModelShape, ParameterSpec

type ShardedEntry = ShardedTensor | ShardedTensorFactory

# The local layer spec stores some norms under the names that Transformer Engine gives them in dense layers with
# ordinary attention. In layers with experts, and with latent attention, Transformer Engine uses other names.
_WITH_EXPERTS = ((re.compile(r"\.mlp\.linear_fc1\.layer_norm_weight$"), ".pre_mlp_layernorm.weight"),)
_WITH_LATENTS = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_weight$"), ".input_layernorm.weight"),
    (
        re.compile(r"\.self_attention\.(q|kv)_layernorm\.weight$"),
        r".self_attention.linear_\1_up_proj.layer_norm_weight",
    ),
)


@dataclasses.dataclass(frozen=True)
class Entries:
    """A model's part of a distributed checkpoint."""

    tensors: dict[str, ShardedEntry]  # by the parameter's name in the tables, in the tables' order
    objects: dict[str, ShardedObject]  # modules' extra state: empty, but expected when a model is loaded

    @classmethod
    def of(cls, model: Any, specs: Sequence[ParameterSpec], shape: ModelShape, metadata: dict[str, Any]) -> Entries:
        """Read the entries from a single-process model.

        Args:
            model: GPTModel, with weights or on the meta device.
            specs: the table of its family.
            shape: sizes of the model.
            metadata: `content_metadata` of the checkpoint, which selects a variant of the format.

        Raises:
            CheckpointError: model and table disagree.
        """
        error = match_model([model], specs, shape, None).error(CheckpointError)
        if error is not None:
            raise error
        state = model.sharded_state_dict(metadata=dict(metadata))
        return cls(
            tensors={spec.name: state[spec.name] for spec in specs},
            objects={key: value for key, value in state.items() if isinstance(value, ShardedObject)},
        )

    def keys(self, spec: ParameterSpec) -> set[str]:
        """Keys of the global tensors that hold the parameter."""
        entry = self.tensors[spec.name]
        return {piece.key for piece in pieces(entry, entry.data)}

    def transformer_engine_objects(self, specs: Sequence[ParameterSpec]) -> dict[str, ShardedObject]:
        """Empty extra state that Transformer Engine's modules expect to load and local modules do not have.

        Without it, a model of that layer spec refuses the checkpoint (missing key ..._extra_state).
        """
        modules = {"decoder.final_layernorm"}
        for spec in specs:
            if spec.layer is not None:
                modules.add(f"decoder.layers.{spec.layer}.self_attention.core_attention")
            for key in (self.tensors[spec.name].key, self.twin_key(spec, self.tensors[spec.name].key)):
                if key is not None and key.endswith("layernorm.weight"):
                    modules.add(key.removesuffix(".weight"))
        keys = sorted(f"{module}._extra_state" for module in modules)
        return {key: ShardedObject(key, None, (1,), (0,), replica_id=(0, 0, 0)) for key in keys}

    def twin_key(self, spec: ParameterSpec, key: str) -> str | None:
        """The key under which Transformer Engine's layer spec looks for the same tensor; None if it is the same key."""
        prefix = f"decoder.layers.{spec.layer}."
        rules: tuple[tuple[re.Pattern[str], str], ...] = ()
        if f"{prefix}mlp.router.weight" in self.tensors:
            rules += _WITH_EXPERTS
        if f"{prefix}self_attention.linear_kv_down_proj.weight" in self.tensors:
            rules += _WITH_LATENTS
        for pattern, replacement in rules:
            if pattern.search(key):
                return pattern.sub(replacement, key)
        return None


def pieces(entry: ShardedEntry, data: torch.Tensor) -> list[ShardedTensor]:
    """The parts in which Megatron stores a parameter whose values are `data` (views of it)."""
    if isinstance(entry, ShardedTensorFactory):
        return list(nested_values([dataclasses.replace(entry, data=data).build()]))
    return [dataclasses.replace(entry, data=data, dtype=data.dtype)]


def assemble(entry: ShardedEntry, read: Callable[[ShardedTensor], torch.Tensor]) -> torch.Tensor:
    """The parameter from its stored parts; `read` returns the values of one part in its local shape."""
    if isinstance(entry, ShardedTensorFactory):
        return entry.merge_fn(dict_list_map_outplace(read, entry.build()))
    return read(entry)


def global_sizes(piece: ShardedTensor) -> tuple[int, ...]:
    """The part's shape within its global tensor, which may have axes before the parameter's (layers, experts)."""
    return (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
