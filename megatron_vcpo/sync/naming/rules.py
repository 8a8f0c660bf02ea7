"""Rule: one line of a family's table. ParameterSpec: the same line for one concrete parameter."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_vcpo.sync.naming.shape import ModelShape

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
    """Gate and up are split along dimension 0 each; a rank holds its part of the gate above its part of up."""
    QKV = enum.auto()
    """Rows interleaved per query group (its query heads, its key head, its value head), then split along dimension 0.
    With more ranks than groups the split cuts through a group, as Megatron does."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a table: names may hold {layer} and {expert}; sizes are names from `ModelShape.dims`."""

    kind: Kind
    megatron: str
    hf: tuple[tuple[str, str], ...]  # ((name, "dim dim"), ...)

    def expand(self, shape: ModelShape, layer: int | None = None, expert: int | None = None) -> ParameterSpec:
        """The rule for one layer and expert."""
        dims = shape.dims
        return ParameterSpec(
            kind=self.kind,
            name=self.megatron.format(layer=layer, expert=expert),
            hf=tuple(
                (name.format(layer=layer, expert=expert), tuple(dims[d] for d in sizes.split()))
                for name, sizes in self.hf
            ),
            layer=layer,
            expert=expert,
        )


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the whole model."""

    kind: Kind
    name: str  # Megatron's, local layer spec, layers and experts counted over the whole model
    hf: tuple[tuple[str, Shape], ...]  # Hugging Face names and full shapes
    layer: int | None  # index over all pipeline stages; None outside the layers
    expert: int | None  # index over all expert-parallel ranks; None for a dense parameter

    def full_shape(self, shape: ModelShape) -> Shape:
        """Shape of the Megatron parameter over all tensor-parallel ranks."""
        rows = shape.padded_vocab_size if self.kind is Kind.VOCAB else sum(s[0] for _, s in self.hf)
        return (rows, *self.hf[0][1][1:])
