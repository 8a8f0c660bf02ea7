"""Sums over packed trajectories and over groups of trajectories.

A packed batch holds n trajectories in T positions; trajectory i owns cu_seqlens[i] : cu_seqlens[i + 1], and positions
from cu_seqlens[-1] on belong to none. Sums are taken with index_add: reproducible to the bit on a CPU, and on a GPU
under torch.use_deterministic_algorithms(True).
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_ids(cu_seqlens: Tensor, num_positions: int) -> Tensor:
    """Trajectory of every packed position: [T] int64, n where a position belongs to none.

    Args:
        cu_seqlens: [n + 1] int, starts at 0, not decreasing; the last one may be below T.
        num_positions: T.
    """
    # searchsorted rather than repeat_interleave: the latter has to wait for the device to learn its output's size.
    positions = torch.arange(num_positions, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].to(torch.int64).contiguous(), positions, right=True)


def segment_sum(values: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """Sums of values [T] over equal ids [T]: [num_segments], in the dtype of values; values of id num_segments are
    dropped."""
    sums = torch.zeros(num_segments + 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, ids, values)[:num_segments]


def segment_max(values: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """Maxima of values [N] over equal ids [N]: [num_segments], -inf for a segment without values."""
    maxima = torch.full((num_segments,), -torch.inf, dtype=values.dtype, device=values.device)
    return maxima.scatter_reduce(0, ids, values, "amax")


def segment_min(values: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """Minima of values [N] over equal ids [N]: [num_segments], +inf for a segment without values."""
    return -segment_max(-values, ids, num_segments)


def spread(values: Tensor, ids: Tensor) -> Tensor:
    """Give every position [T] its trajectory's value [n]; 0 at positions that belong to none."""
    return torch.cat([values, values.new_zeros(1)])[ids]


def dense_ids(group_ids: Tensor) -> tuple[Tensor, int]:
    """Renumber arbitrary group ids [N] to 0 .. number of groups - 1; returns the new ids and that number."""
    unique, dense = torch.unique(group_ids, return_inverse=True)
    return dense, unique.numel()
