"""Pack trajectories into micro-batches: first a plan, a pure function of lengths; then the tensors.

Every rank computes the same plan from the same list, so no communication is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_vcpo.data.routes import signed_routes
from megatron_vcpo.data.trajectory import Trajectory


class PackingError(ValueError):
    """A trajectory that cannot be packed; the message names it and the flag to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """Which trajectories go into which micro-batch of which data-parallel rank."""

    bins: tuple[tuple[tuple[int, ...], ...], ...]  # [data-parallel rank][micro-batch] -> trajectory indices
    groups_together: bool  # every group lies within one micro-batch

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank (equally many on all)."""
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

    Trajectories, largest first, go into the emptiest micro-batch; micro-batches are then dealt to the ranks so that
    their totals are close. With `prefer_groups`, every group is kept within one micro-batch if all groups fit, so that
    baselines need no extra pass.

    Args:
        lengths: tokens of each trajectory.
        group_ids: prompt group of each trajectory.
        budget: tokens of one micro-batch.
        dp_size: data-parallel ranks.
        multiple: the number of micro-batches of a rank is a multiple of this (pipeline stages with interleaving).
        prefer_groups: keep every group within one micro-batch if all groups fit.

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
        for tightest in (False, True):  # balanced if that fits, else the tightest fit
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAlignment:
    """What the layout requires of a micro-batch's rows, and which of them this rank holds.

    Under context parallelism every sequence is cut into 2 * cp_size chunks; rank r holds the r-th from the front and
    the r-th from the end, so that causal attention costs every rank the same (Transformer Engine's order).
    """

    cp_rank: int = 0
    cp_size: int = 1
    token_multiple: int = 1  # divides the rows of one rank (tensor-parallel size under sequence parallelism)
    equal_rows: bool = False  # all micro-batches of a step have the same number of rows (MoE allgather dispatcher)

    @property
    def sequence_multiple(self) -> int:
        """Every sequence is padded to a multiple of this."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        """The rows of a micro-batch, over all context-parallel ranks, are a multiple of this."""
        return math.lcm(self.sequence_multiple, self.cp_size * self.token_multiple)

    def sequence_rows(self, length: int) -> int:
        """Rows that a sequence of `length` tokens occupies, padding included."""
        return length + -length % self.sequence_multiple

    def rows(self, lengths: Sequence[int]) -> int:
        """Rows of a micro-batch with sequences of these lengths; the minimum for an empty one."""
        real = sum(map(self.sequence_rows, lengths))
        return real + -real % self.row_multiple if real else self.row_multiple * max(1, 2 // self.row_multiple)

    def context_rows(self, cu_seqlens: Sequence[int]) -> npt.NDArray[np.int64]:
        """[cp_size, T / cp_size]: the rows that each context-parallel rank holds, in its order."""
        held: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(self.cp_size)]
        for start, end in itertools.pairwise(cu_seqlens):
            chunks = np.arange(start, end).reshape(2 * self.cp_size, -1)
            for rank in range(self.cp_size):
                held[rank] += [chunks[rank], chunks[-1 - rank]]
        return np.stack([np.concatenate(parts) for parts in held])


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch of T rows. Row t holds a token; labels and masks at t describe the token it predicts.

    The model reads the T' = T / cp_size rows of this context-parallel rank; everything else describes all T rows.
    """

    tokens: Tensor  # [1, T'] int64
    labels: Tensor  # [1, T'] int64, the next token of the same trajectory, 0 at its end
    position_ids: Tensor  # [1, T'] int64
    cu_seqlens: Tensor  # [s + 1] int32, s = trajectories, plus one if there is a padding sequence
    max_seqlen: int
    response_mask: Tensor  # [T] bool: the label is a token that the policy sampled
    behavior_logprobs: Tensor  # [T] fp32 log-prob of the label, 0 elsewhere
    indices: tuple[int, ...]  # places of its trajectories in the minibatch
    starts: tuple[int, ...]  # first row of each of them
    context_rows: Tensor | None = None  # [cp_size, T'] int64, None without context parallelism
    reference_logprobs: Tensor | None = None  # [T] fp32, set by a scoring pass
    routes: Tensor | None = None  # [T, layers with experts, k] int16, -1 for tokens without; None if all lack them

    @property
    def num_trajectories(self) -> int:
        """Number of real trajectories; 0 for a filler."""
        return len(self.indices)

    @property
    def num_rows(self) -> int:
        """T, rows over all context-parallel ranks, padding included."""
        return self.response_mask.numel()

    @property
    def trajectory_ends(self) -> Tensor:
        """[n + 1] int32 cu_seqlens of the real trajectories alone."""
        return self.cu_seqlens[: self.num_trajectories + 1]


def build_micro_batch(
    trajectories: Sequence[Trajectory],
    indices: tuple[int, ...],
    *,
    alignment: RowAlignment,
    device: torch.device,
    rows: int | None = None,
) -> MicroBatch:
    """Tensors of one micro-batch.

    A sequence's own padding comes after its tokens, where causal attention never looks; the padding that completes the
    micro-batch is a sequence of its own.

    Args:
        trajectories: the whole minibatch.
        indices: the trajectories that this micro-batch holds; with none it is a filler that trains nothing.
        alignment: what the layout requires of the rows.
        device: of the tensors.
        rows: T; default: as few as the alignment allows.
    """
    chosen = [trajectories[i] for i in indices]
    lengths = [t.num_tokens for t in chosen]
    spans = [alignment.sequence_rows(length) for length in lengths]
    total = alignment.rows(lengths) if rows is None else rows
    if padding := total - sum(spans):
        spans.append(padding)
    ends = np.concatenate([[0], np.cumsum(spans)])
    tokens = np.zeros(total, np.int64)
    labels = np.zeros(total, np.int64)
    mask = np.zeros(total, bool)
    logprobs = np.zeros(total, np.float32)
    for trajectory, length, start in zip(chosen, lengths, ends.tolist()):
        ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
        tokens[start : start + length] = ids
        labels[start : start + length - 1] = ids[1:]
        first = start + len(trajectory.prompt_ids) - 1  # the row that predicts the first response token
        last = first + len(trajectory.response_ids)
        mask[first:last] = trajectory.response_mask
        logprobs[first:last] = trajectory.behavior_logprobs
    model_inputs = np.stack([tokens, labels, np.concatenate([np.arange(span) for span in spans])])
    context_rows = None
    if alignment.cp_size > 1:
        context_rows = alignment.context_rows(ends.tolist())
        model_inputs = model_inputs[:, context_rows[alignment.cp_rank]]
    own = torch.from_numpy(model_inputs).to(device)
    routes = packed_routes(chosen, ends.tolist(), total)
    return MicroBatch(
        tokens=own[0:1],
        labels=own[1:2],
        position_ids=own[2:3],
        cu_seqlens=torch.from_numpy(ends.astype(np.int32)).to(device),
        max_seqlen=max(spans),
        response_mask=torch.from_numpy(mask).to(device),
        behavior_logprobs=torch.from_numpy(logprobs).to(device),
        indices=indices,
        starts=tuple(ends[: len(indices)].tolist()),
        context_rows=None if context_rows is None else torch.from_numpy(context_rows).to(device),
        routes=None if routes is None else torch.from_numpy(routes).to(device),
    )


def packed_routes(trajectories: Sequence[Trajectory], starts: Sequence[int], rows: int) -> npt.NDArray[np.int16] | None:
    """Routes of packed trajectories [rows, layers, k], -1 in padding and where a trajectory has none; None if no
    trajectory has any.

    Raises:
        PackingError: trajectories with routes of different models.
    """
    known = [(t, t.routed_experts, start) for t, start in zip(trajectories, starts) if t.routed_experts is not None]
    shapes = {routes.shape[1:] for _, routes, _ in known}
    if len(shapes) > 1:
        raise PackingError(f"Trajectories carry routes of different models: (layers, k) are {sorted(shapes)}.")
    if not known:
        return None
    packed = np.full((rows, *shapes.pop()), -1, np.int16)
    for trajectory, routes, start in known:
        packed[start : start + trajectory.num_tokens] = signed_routes(routes)
    return packed
