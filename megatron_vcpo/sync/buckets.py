"""Buckets: consecutive small parameters that are sent together, so that one collective moves many of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron_vcpo.models.naming import ModelShape, ParameterLayout, ParameterSpec, shard_shape


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one pipeline stage and, if they are experts', of one expert-parallel rank."""

    specs: tuple[ParameterSpec, ...]
    stage: int  # rank in the pipeline group that owns them
    expert_rank: int | None  # rank in the expert-parallel group that owns them; None for dense parameters
    tp_size: int  # ranks that a parameter is split over
    shard_numel: int  # elements that one of these ranks holds
    dtype: torch.dtype | None = None  # dtype that these parameters keep; None: the stream's

    def nbytes(self, itemsize: int) -> int:
        """Bytes of all shards together, in a stream whose elements have `itemsize` bytes."""
        return self.shard_numel * self.tp_size * (self.dtype.itemsize if self.dtype else itemsize)


def plan_buckets(
    specs: Iterable[ParameterSpec],
    stage_of: Mapping[str, int],
    shape: ModelShape,
    layout: ParameterLayout,
    *,
    itemsize: int,
    bucket_bytes: int,
) -> list[Bucket]:
    """Cut the parameters, in order, into buckets of at most `bucket_bytes`; a larger parameter is a bucket of its own.

    The result is the same on every rank: it depends on the groups' sizes, never on this rank's index in them.
    """
    buckets: list[Bucket] = []
    for spec in specs:
        tp_size = layout.tp_of(spec)[1]
        numel = math.prod(shard_shape(spec, shape, tp_size))
        experts_here = shape.num_experts // layout.ep_size
        owner = None if spec.expert is None else spec.expert // experts_here
        fresh = Bucket((spec,), stage_of[spec.name], owner, tp_size, numel, spec.dtype)
        last = buckets[-1] if buckets else None
        if (
            last is not None
            and _travels_with(last) == _travels_with(fresh)
            and last.nbytes(itemsize) + fresh.nbytes(itemsize) <= bucket_bytes
        ):
            buckets[-1] = dataclasses.replace(
                last, specs=last.specs + fresh.specs, shard_numel=last.shard_numel + numel
            )
        else:
            buckets.append(fresh)
    return buckets


def _travels_with(bucket: Bucket) -> tuple[int, int | None, int, torch.dtype | None]:
    return bucket.stage, bucket.expert_rank, bucket.tp_size, bucket.dtype
