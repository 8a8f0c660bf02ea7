"""Whether a model's gradients and parameters are finite."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gradients_finite(model: list[Any]) -> bool:
    """Whether every gradient buffer of this rank is finite; reads the buffers once and copies nothing."""
    return all(
        _finite(buffer.grad_data)
        for chunk in model
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        if buffer.grad_data.numel()
    )


def broken_parameter(model: list[Any]) -> str | None:
    """The first parameter of any rank that is not finite, with its rank; None if all are finite.

    Collective over all ranks, which exchange pickled names: slow, so only for when something is wrong.
    """
    names = (name for chunk in model for name, param in chunk.named_parameters() if not _finite(param.detach()))
    found: list[str | None] = [next(names, None)]
    if dist.is_initialized():
        found = found * dist.get_world_size()
        dist.all_gather_object(found, found[dist.get_rank()])
    return next((f"{name} on rank {rank}" for rank, name in enumerate(found) if name is not None), None)


def _finite(values: Tensor) -> bool:
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())
