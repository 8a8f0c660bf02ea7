"""Full Hugging Face tensors from Megatron's tensor-parallel shards, and one shard from Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from megatron_vcpo.models.naming.rules import Kind, ParameterSpec, Shape
from megatron_vcpo.models.naming.shape import ModelShape, NamingError


class Sliceable(Protocol):
    """A tensor, or safetensors' lazily read slice; indexing gives a tensor."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


def shard_shape(spec: ParameterSpec, shape: ModelShape, tp_size: int) -> Shape:
    """Shape of one tensor-parallel rank's part of the parameter; NamingError if it does not divide."""
    full = spec.full_shape(shape)
    if spec.kind in (Kind.REPLICATED, Kind.EXPERTS_COPY):
        return full
    dim = 1 if spec.kind in (Kind.ROW, Kind.EXPERTS_ROW) else 0
    # gate and up are split separately, so the size of each must divide
    size = full[dim] // 2 if spec.kind in (Kind.GATE_UP, Kind.EXPERTS_GATE_UP) else full[dim]
    if size % tp_size:
        raise NamingError(
            f"{spec.name}: {size} does not divide over {tp_size} tensor-parallel ranks; "
            "change --tensor-model-parallel-size (or --expert-tensor-parallel-size)."
        )
    return tuple(n // tp_size if i == dim else n for i, n in enumerate(full))


def export_tensors(spec: ParameterSpec, shape: ModelShape, shards: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, full tensor) from the parameter's shards, stacked `[tp, *shard_shape]`.

    A tensor that needs no reordering is a view of `shards`; the others are built one at a time, on demand. If
    `spec.is_joined`, the tensor is one expert's part, and `join_experts` builds the whole.
    """
    names = [name for name, _ in spec.hf]
    match spec.kind:
        case Kind.LATENT:
            raise AssertionError("a rule's kind; Rule.expand resolves it")
        case Kind.REPLICATED:
            yield names[0], shards[0]
        case Kind.COLUMN:
            yield names[0], shards.flatten(0, 1)
        case Kind.VOCAB:
            yield names[0], shards.flatten(0, 1)[: shape.vocab_size]
        case Kind.ROW:
            yield names[0], shards.transpose(0, 1).flatten(1)
        case Kind.EXPERTS_COPY:
            yield names[0], shards[0]
        case Kind.EXPERTS_ROW:
            yield names[0], shards.transpose(0, 1).flatten(1).t()
        case Kind.EXPERTS_GATE_UP:
            pairs = shards.unflatten(1, (2, -1)).transpose(1, 2).flatten(0, 2)  # [tp * ffn / tp * 2, ...]
            yield names[0], pairs.t()
        case Kind.GATE_UP:
            halves = shards.unflatten(1, (2, -1))  # [tp, 2, ffn / tp, hidden]
            for index, name in enumerate(names):
                yield name, halves[:, index].flatten(0, 1)
        case Kind.QKV:
            queries = shape.num_heads // shape.num_query_groups
            groups = shards.flatten(0, 1).unflatten(0, (shape.num_query_groups, queries + 2, shape.head_dim))
            for name, heads in zip(names, (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, None))):
                yield name, groups[:, heads].flatten(0, 2)


def import_shard(
    spec: ParameterSpec, shape: ModelShape, read: Callable[[str], Sliceable], tp_rank: int, tp_size: int
) -> torch.Tensor:
    """One rank's shard, `[*shard_shape]`; `read` returns a Hugging Face tensor by name, of which only the shard's part
    is read."""
    rows = shard_shape(spec, shape, tp_size)[0]
    names = [name for name, _ in spec.hf]
    mine = slice(tp_rank * rows, (tp_rank + 1) * rows)
    match spec.kind:
        case Kind.REPLICATED:
            return read(names[0])[:]
        case Kind.COLUMN:
            return read(names[0])[mine]
        case Kind.ROW:
            columns = spec.hf[0][1][1] // tp_size
            return read(names[0])[:, tp_rank * columns : (tp_rank + 1) * columns]
        case Kind.VOCAB:
            return _vocab_rows(spec, read(names[0]), mine)
        case Kind.EXPERTS_COPY:
            return read(names[0])[_one(spec)][0]
        case Kind.EXPERTS_ROW:
            columns = spec.hf[0][1][1] // tp_size
            return read(names[0])[_one(spec), tp_rank * columns : (tp_rank + 1) * columns][0].t()
        case Kind.EXPERTS_GATE_UP:
            bias = len(spec.hf[0][1]) == 2
            part = read(names[0])[(_one(spec), mine) if bias else (_one(spec), slice(None), mine)][0]
            return part.t().unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        case Kind.GATE_UP:
            half = slice(tp_rank * (rows // 2), (tp_rank + 1) * (rows // 2))
            return torch.cat([read(name)[half] for name in names])
        case Kind.QKV:
            return _interleave_qkv(spec, shape, read, tp_rank, tp_size)


def join_experts(
    parts: Iterable[tuple[ParameterSpec, str, torch.Tensor]], shape: ModelShape
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, full tensor) from `export_tensors`' results in the order of `Family.parameters`.

    A tensor of all experts of a layer is built from their parts, which arrive in a row; nothing else is copied.
    """
    whole: torch.Tensor | None = None
    for spec, name, part in parts:
        if not spec.is_joined:
            yield name, part
            continue
        if whole is None:
            whole = part.new_empty(spec.hf[0][1])
        assert spec.expert is not None
        whole[spec.expert] = part
        if spec.expert == shape.num_experts - 1:
            yield name, whole
            whole = None


def _one(spec: ParameterSpec) -> slice:
    assert spec.expert is not None
    return slice(spec.expert, spec.expert + 1)


def _vocab_rows(spec: ParameterSpec, tensor: Sliceable, mine: slice) -> torch.Tensor:
    """Rows `mine` of the padded vocabulary; rows beyond the true vocabulary are zero."""
    vocab = spec.hf[0][1][0]
    part = tensor[min(mine.start, vocab - 1) : min(max(mine.stop, mine.start), vocab)]
    if mine.start >= vocab:  # this rank holds only padding; one row is read for its dtype and width
        return torch.zeros_like(part[:1]).expand(mine.stop - mine.start, -1)
    missing = mine.stop - mine.start - len(part)
    return torch.cat([part, part.new_zeros(missing, part.shape[1])]) if missing else part


def _interleave_qkv(
    spec: ParameterSpec, shape: ModelShape, read: Callable[[str], Sliceable], tp_rank: int, tp_size: int
) -> torch.Tensor:
    groups, dim = shape.num_query_groups, shape.head_dim
    queries = shape.num_heads // groups
    split = groups % tp_size == 0  # each rank has whole groups: read only this rank's
    first, count = (tp_rank * groups // tp_size, groups // tp_size) if split else (0, groups)
    parts = []
    for (name, _), heads in zip(spec.hf, (queries, 1, 1)):
        part = read(name)[first * heads * dim : (first + count) * heads * dim]
        parts.append(part.unflatten(0, (count, heads, dim)))
    rows = torch.cat(parts, dim=1).flatten(0, 2)
    return rows if split else rows.chunk(tp_size)[tp_rank]
