"""Buckets: consecutive small parameters that travel together, so that one collective moves many of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_vcpo.sync.naming import Layout, ModelShape, ParameterSpec, shard_shape


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters held by one pipeline stage and, for experts, one expert-parallel rank."""

    specs: tuple[ParameterSpec, ...]
    stage: int  # rank in the pipeline group that owns them
    expert_rank: int | None  # rank in the expert-parallel group that owns them; None for dense parameters
    tp_size: int  # ranks that a parameter is split over
    shard_numel: int  # elements that one of these ranks holds

    def nbytes(self, itemsize: int) -> int:
        """Bytes of all shards together."""
        return self.shard_numel * self.tp_size * itemsize


def plan_buckets(
    specs: Iterable[ParameterSpec],
    stage_of: Mapping[str, int],
    shape: ModelShape,
    layout: Layout,
    *,
    itemsize: int,
    bucket_bytes: int,
) -> list[Bucket]:
    """Cut the sequence of parameters, in order, into buckets of at most `bucket_bytes`, or of one parameter.

    The result is the same on every rank: it uses only sizes of groups, never this rank's place in them.
    """
    buckets: list[Bucket] = []
    for spec in specs:
        tp_size = layout.tp_of(spec)[1]
        numel = math.prod(shard_shape(spec, shape, tp_size))
        experts_here = shape.num_experts // layout.ep_size
        owner = None if spec.expert is None else spec.expert // experts_here
        fresh = Bucket((spec,), stage_of[spec.name], owner, tp_size, numel)
        last = buckets[-1] if buckets else None
        if (
            last is not None
            and (last.stage, last.expert_rank, last.tp_size) == (fresh.stage, fresh.expert_rank, fresh.tp_size)
            and last.nbytes(itemsize) + fresh.nbytes(itemsize) <= bucket_bytes
        ):
            buckets[-1] = Bucket(
                last.specs + fresh.specs, last.stage, last.expert_rank, tp_size, last.shard_numel + numel
            )
        else:
            buckets.append(fresh)
    return buckets
