"""Trajectories to packed micro-batches: a pure plan first, tensors second.

The plan is a function of lengths alone and is computed by every rank from the same list, so no rank has to be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_vcpo.rollout.trajectory import Trajectory


class PackingError(ValueError):
    """A trajectory that cannot be packed; the message names it and the flag to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """Which trajectories go into which micro-batch of which data-parallel rank."""

    bins: tuple[tuple[tuple[int, ...], ...], ...]  # [data-parallel rank][micro-batch] -> trajectory indices
    groups_together: bool  # every group lies within one micro-batch

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of every rank (the same on all)."""
        return len(self.bins[0])


def plan_micro_batches(
    lengths: Sequence[int],
    group_ids: Sequence[int],
    *,
    budget: int,
    dp_size: int,
    multiple: int = 1,
    prefer_groups: bool = True,
) -> PackingPlan:
    """Distribute trajectories over data-parallel ranks and micro-batches of at most `budget` tokens.

    Bins are filled largest first into the emptiest one, then dealt to the ranks so that their totals are close. Groups
    are kept within one micro-batch when all of them fit and it is asked for: then their baselines need no extra pass.

    Args:
        lengths: tokens of each trajectory.
        group_ids: prompt group of each trajectory.
        budget: tokens of one micro-batch.
        dp_size: data-parallel ranks.
        multiple: the number of micro-batches of a rank is a multiple of this (pipeline stages with interleaving).
        prefer_groups: keep groups together where they fit.

    Raises:
        PackingError: a trajectory is longer than the budget.
    """
    for index, length in enumerate(lengths):
        if length > budget:
            raise PackingError(
                f"trajectory {index} has {length} tokens, more than a micro-batch holds ({budget}); "
                "raise --vcpo-tokens-per-micro-batch or lower --rollout-max-response-length."
            )
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    group_units = list(members.values())
    together = prefer_groups and all(sum(lengths[i] for i in unit) <= budget for unit in group_units)
    units = group_units if together else [[index] for index in range(len(lengths))]
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    bins = _fill_bins(sizes, budget, dp_size * multiple)
    ranks = _deal([[i for unit in bin_ for i in units[unit]] for bin_ in bins], lengths, dp_size)
    return PackingPlan(bins=ranks, groups_together=together or all(len(unit) == 1 for unit in group_units))


def _fill_bins(sizes: list[int], budget: int, step: int) -> list[list[int]]:
    order = sorted(range(len(sizes)), key=lambda unit: (-sizes[unit], unit))
    count = max(step, math.ceil(math.ceil(sum(sizes) / budget) / step) * step)
    while True:
        for tightest in (False, True):  # balanced first; the tightest fit where balance does not fit
            filled = _place(order, sizes, budget, count, tightest)
            if filled is not None:
                return filled
        count += step


def _place(order: list[int], sizes: list[int], budget: int, count: int, tightest: bool) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = np.zeros(count, dtype=np.int64)
    for unit in order:
        fits = loads + sizes[unit] <= budget
        if not fits.any():
            return None
        score = np.where(fits, loads, -1 if tightest else np.iinfo(np.int64).max)
        target = int(score.argmax() if tightest else score.argmin())
        bins[target].append(unit)
        loads[target] += sizes[unit]
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], dp_size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    order = sorted(range(len(bins)), key=lambda b: (-sum(lengths[i] for i in bins[b]), b))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp_size)]
    for position, index in enumerate(order):  # back and forth: 0 1 2 | 2 1 0 | 0 1 2
        turn, offset = divmod(position, dp_size)
        ranks[offset if turn % 2 == 0 else dp_size - 1 - offset].append(tuple(sorted(bins[index])))
    return tuple(tuple(rank) for rank in ranks)


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch. Row t holds a token, and in labels and masks what it predicts."""

    tokens: Tensor  # [1, T] int64
    labels: Tensor  # [1, T] int64, the next token of the same trajectory, 0 at its end
    position_ids: Tensor  # [1, T] int64
    cu_seqlens: Tensor  # [s + 1] int32, s = trajectories plus one padding sequence where there is one
    max_seqlen: int
    response_mask: Tensor  # [T] bool: the label is a token that the policy sampled
    behavior_logprobs: Tensor  # [T] fp32 of the label, 0 elsewhere
    indices: tuple[int, ...]  # of its trajectories in the minibatch
    reference_logprobs: Tensor | None = None  # [T] fp32, set by a scoring pass

    @property
    def num_trajectories(self) -> int:
        """Real trajectories in it; 0 for a filler."""
        return len(self.indices)

    @property
    def trajectory_ends(self) -> Tensor:
        """[n + 1] int32 cu_seqlens of the real trajectories alone."""
        return self.cu_seqlens[: self.num_trajectories + 1]


def padded_rows(real: int, multiple: int) -> int:
    """Rows of a micro-batch that holds `real` tokens: a multiple of `multiple`, and a few where there are no tokens."""
    return real + -real % multiple if real else multiple * max(1, 2 // multiple)


def build_micro_batch(
    trajectories: Sequence[Trajectory], indices: tuple[int, ...], *, multiple: int, device: torch.device
) -> MicroBatch:
    """Tensors of one micro-batch; padding to a multiple of `multiple` is one more sequence of its own.

    Args:
        trajectories: the whole minibatch.
        indices: those that this micro-batch holds; none makes a filler that trains nothing.
        multiple: T is a multiple of it (tensor-parallel ranks under sequence parallelism).
    """
    chosen = [trajectories[i] for i in indices]
    lengths = [t.num_tokens for t in chosen]
    real = sum(lengths)
    total = padded_rows(real, multiple)
    padding = total - real
    spans = lengths + ([padding] if padding else [])
    tokens = np.zeros(total, np.int64)
    labels = np.zeros(total, np.int64)
    mask = np.zeros(total, bool)
    logprobs = np.zeros(total, np.float32)
    start = 0
    for trajectory, length in zip(chosen, lengths):
        ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
        tokens[start : start + length] = ids
        labels[start : start + length - 1] = ids[1:]
        first = start + len(trajectory.prompt_ids) - 1  # the row that predicts the first response token
        last = first + len(trajectory.response_ids)
        mask[first:last] = trajectory.response_mask
        logprobs[first:last] = trajectory.behavior_logprobs
        start += length
    positions = np.concatenate([np.arange(span) for span in spans])
    cu_seqlens = np.concatenate([[0], np.cumsum(spans)]).astype(np.int32)
    return MicroBatch(
        tokens=torch.from_numpy(tokens)[None].to(device),
        labels=torch.from_numpy(labels)[None].to(device),
        position_ids=torch.from_numpy(positions)[None].to(device),
        cu_seqlens=torch.from_numpy(cu_seqlens).to(device),
        max_seqlen=max(spans),
        response_mask=torch.from_numpy(mask).to(device),
        behavior_logprobs=torch.from_numpy(logprobs).to(device),
        indices=indices,
    )
