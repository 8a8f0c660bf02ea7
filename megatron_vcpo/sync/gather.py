"""WeightGatherer: the whole model as a stream of Hugging Face tensors, on every model-parallel rank.

    match (names, shapes, owners)  ->  plan (buckets)  ->  stream (collectives, one bucket at a time)

The plan is made once, with one small exchange; a stream holds one bucket and one tensor at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_vcpo.models.match import match_model
from megatron_vcpo.models.naming import (
    Family,
    ModelShape,
    ParameterLayout,
    ParameterSpec,
    export_tensors,
    join_experts,
    shard_shape,
)
from megatron_vcpo.runtime.agreement import raise_together
from megatron_vcpo.sync.buckets import Bucket, plan_buckets
from megatron_vcpo.sync.errors import SyncError


class WeightGatherer:
    """Streams (Hugging Face name, full tensor) of a Megatron model, in the same order on every rank.

    Args:
        model_chunks: this rank's GPTModels (one for each virtual pipeline stage), wrapped or not.
        family: the table of names.
        shape: sizes of the whole model.
        groups: object with process groups `tp`, `pp`, `ep` and `expt_tp` (Megatron's ProcessGroupCollection); None
            for a single process.
        dtype: dtype of the streamed tensors, except those that the table keeps in another; converted before sending.
        bucket_bytes: most bytes sent together; a larger parameter is sent alone.
        keep_float32: Hugging Face names to send in float32, because the engine holds them so (a router's weights).

    Raises:
        SyncError: on every rank, if model and table disagree; all names are listed.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        family: Family,
        shape: ModelShape,
        groups: Any | None = None,
        *,
        dtype: torch.dtype,
        bucket_bytes: int = 64 << 20,
        keep_float32: Collection[str] = (),
    ) -> None:
        self._shape = shape
        self._groups = groups
        self._layout = ParameterLayout.of(groups)
        self._dtype = dtype
        self._specs = [_kept(spec, keep_float32) for spec in family.parameters(shape)]
        match = match_model(model_chunks, self._specs, shape, groups)
        raise_together(match.error(SyncError))
        self._local = match.local
        self.device = next(iter(self._local.values())).device
        self.buckets = plan_buckets(
            self._specs, match.stage_of, shape, self._layout, itemsize=dtype.itemsize, bucket_bytes=bucket_bytes
        )

    @property
    def entries(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(Hugging Face name, dtype, full shape) of every tensor, in the order of the stream."""
        found = {name: (spec.dtype or self._dtype, size) for spec in self._specs for name, size in spec.hf}
        return [(name, *entry) for name, entry in found.items()]

    @property
    def names(self) -> list[str]:
        """Every Hugging Face name, in the order of the stream."""
        return [name for name, *_ in self.entries]

    @property
    def nbytes(self) -> int:
        """Bytes of one stream."""
        return sum(math.prod(size) * dtype.itemsize for _, dtype, size in self.entries)

    @torch.no_grad()
    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once. Collective over all ranks: each must consume the stream to its end.

        A tensor may be a view of a parameter or of a buffer that the next step reuses: copy it to keep it.
        """
        parts = (part for bucket in self.buckets for part in self._export(bucket))
        yield from join_experts(parts, self._shape)

    def _export(self, bucket: Bucket) -> Iterator[tuple[ParameterSpec, str, torch.Tensor]]:
        if self._layout.is_single:
            for spec in bucket.specs:
                shards = self._local[spec.name].detach().to(bucket.dtype or self._dtype).unsqueeze(0)
                yield from ((spec, *pair) for pair in export_tensors(spec, self._shape, shards))
            return
        shards = self._gather(bucket)
        start = 0
        for spec in bucket.specs:
            size = shard_shape(spec, self._shape, bucket.tp_size)
            stop = start + math.prod(size)
            pairs = export_tensors(spec, self._shape, shards[:, start:stop].unflatten(1, size))
            yield from ((spec, *pair) for pair in pairs)
            start = stop

    def _gather(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's shards from all tensor-parallel ranks, `[tp, shard_numel]`."""
        layout, groups, dtype = self._layout, self._groups, bucket.dtype or self._dtype
        assert groups is not None
        on_stage = layout.pp_rank == bucket.stage
        if on_stage and bucket.expert_rank in (None, layout.ep_rank):
            flat = self._pack(bucket)
        else:
            flat = torch.empty(bucket.shard_numel, dtype=dtype, device=self.device)
        # broadcast shards first; the tensor-parallel gather, over the fastest links, comes last
        if on_stage and bucket.expert_rank is not None and layout.ep_size > 1:
            dist.broadcast(flat, group=groups.ep, group_src=bucket.expert_rank)
        if layout.pp_size > 1:
            dist.broadcast(flat, group=groups.pp, group_src=bucket.stage)
        if bucket.tp_size == 1:
            return flat.unsqueeze(0)
        gathered = torch.empty(bucket.tp_size * bucket.shard_numel, dtype=dtype, device=self.device)
        dist.all_gather_into_tensor(gathered, flat, group=groups.tp if bucket.expert_rank is None else groups.expt_tp)
        return gathered.view(bucket.tp_size, bucket.shard_numel)

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        """This rank's shards of the bucket, flat; a single parameter of the right dtype is not copied."""
        dtype = bucket.dtype or self._dtype
        parts = [self._local[spec.name].detach().to(dtype).flatten() for spec in bucket.specs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _kept(spec: ParameterSpec, keep_float32: Collection[str]) -> ParameterSpec:
    if spec.dtype is None and all(name in keep_float32 for name, _ in spec.hf):
        return dataclasses.replace(spec, dtype=torch.float32)
    return spec
