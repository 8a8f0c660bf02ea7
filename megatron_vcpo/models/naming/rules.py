"""Rule: one row of a family's table. ParameterSpec: that row for one concrete parameter."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from megatron_vcpo.models.naming.shape import ModelShape

Shape = tuple[int, ...]


class Kind(enum.Enum):
    """How a Megatron parameter is built from Hugging Face tensors and split over tensor-parallel ranks."""

    REPLICATED = enum.auto()
    """The same tensor on every rank."""
    COLUMN = enum.auto()
    """Split along dimension 0."""
    ROW = enum.auto()
    """Split along dimension 1."""
    VOCAB = enum.auto()
    """Rows padded with zeros up to the padded vocabulary, then split along dimension 0."""
    GATE_UP = enum.auto()
    """Gate and up are each split along dimension 0; a rank holds its part of the gate followed by its part of up."""
    QKV = enum.auto()
    """Rows interleaved per query group (its query heads, its key head, its value head), then split along dimension 0.
    With more ranks than groups, the split cuts through a group, as in Megatron."""
    EXPERTS_GATE_UP = enum.auto()
    """One Hugging Face tensor for all experts of a layer, [experts, hidden, 2 ffn], gate and up in alternate columns
    (a bias: [experts, 2 ffn]); each Megatron parameter is one expert's, as GATE_UP."""
    EXPERTS_ROW = enum.auto()
    """One Hugging Face tensor for all experts of a layer, [experts, ffn, hidden]; each Megatron parameter is one
    expert's, transposed, as ROW."""
    EXPERTS_COPY = enum.auto()
    """One Hugging Face tensor for all experts of a layer, [experts, hidden]; each Megatron parameter is one expert's,
    as REPLICATED."""
    LATENT = enum.auto()
    """A projection down to latents: COLUMN in the local layer spec, REPLICATED in Transformer Engine's. Only rules have
    this kind; a `ParameterSpec` has one of the two."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table: names may contain {layer} and {expert}; sizes are keys of `ModelShape.dims`."""

    kind: Kind
    megatron: str
    hf: tuple[tuple[str, str], ...]  # ((name, "dim dim"), ...)
    optional: bool = False  # left out if one of its sizes is zero
    dtype: torch.dtype | None = None  # the type it keeps on its way to an engine; None: the engine's

    def applies(self, shape: ModelShape) -> bool:
        """Whether the model has this parameter."""
        return not self.optional or all(shape.dims[d] for _, sizes in self.hf for d in sizes.split())

    def expand(self, shape: ModelShape, layer: int | None = None, expert: int | None = None) -> ParameterSpec:
        """The rule for one layer and expert."""
        dims, kind = shape.dims, self.kind
        if kind is Kind.LATENT:
            kind = Kind.COLUMN if shape.latent is not None and shape.latent.down_is_split else Kind.REPLICATED
        return ParameterSpec(
            kind=kind,
            name=self.megatron.format(layer=layer, expert=expert),
            hf=tuple(
                (name.format(layer=layer, expert=expert), tuple(dims[d] for d in sizes.split()))
                for name, sizes in self.hf
            ),
            layer=layer,
            expert=expert,
            dtype=self.dtype,
        )


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the whole model."""

    kind: Kind
    name: str  # Megatron's name in the local layer spec; layers and experts counted over the whole model
    hf: tuple[tuple[str, Shape], ...]  # Hugging Face names and full shapes
    layer: int | None  # index over all pipeline stages; None outside the layers
    expert: int | None  # index over all expert-parallel ranks; None for a dense parameter
    dtype: torch.dtype | None = None  # the type it keeps on its way to an engine; None: the engine's

    @property
    def is_joined(self) -> bool:
        """Whether one Hugging Face tensor holds this parameter for all experts of the layer."""
        return self.kind in (Kind.EXPERTS_GATE_UP, Kind.EXPERTS_ROW, Kind.EXPERTS_COPY)

    def full_shape(self, shape: ModelShape) -> Shape:
        """Shape of the whole Megatron parameter, over all tensor-parallel ranks."""
        if self.is_joined:
            return tuple(reversed(self.hf[0][1][1:]))
        rows = shape.padded_vocab_size if self.kind is Kind.VOCAB else sum(s[0] for _, s in self.hf)
        return (rows, *self.hf[0][1][1:])
