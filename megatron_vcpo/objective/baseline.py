"""Baselines subtracted from the rewards, and the scales that normalize what is left.

Every function takes rewards [N] (any dtype) and group ids [N] (arbitrary int64, groups of any size in any order; all
zeros for a minibatch-wide scope) and returns fp64 [N]. A trajectory whose reward is not finite takes no part in any
statistic; it still gets its group's value (0 in a group without any usable reward).

All sums run over R - min(R of the group), so a group of equal rewards gets a baseline bitwise equal to them, and a
constant added to all rewards costs no precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_vcpo.objective.segments import dense_ids, segment_max, segment_min, segment_sum

_ROUNDING = 1e-6
"""A standard deviation below this fraction of the largest |reward| is rounding (rewards are sums of fp32 parts), and
dividing by it would turn noise into a full-size advantage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineResult:
    """Baselines, and where the plain mean replaces an optimal one."""

    values: Tensor  # [N] fp64
    fallback: Tensor  # [N] bool, True where no energy was usable, so that the value is the plain mean


@dataclass(frozen=True, kw_only=True, slots=True)
class _Groups:
    ids: Tensor  # [N] dense
    size: int  # number of groups
    usable: Tensor  # [N] bool, finite reward
    origin: Tensor  # [N] fp64, smallest usable reward of the group
    excess: Tensor  # [N] fp64, reward - origin, 0 where not usable

    def total(self, values: Tensor) -> Tensor:
        """Sum over the trajectory's group: [N]."""
        return segment_sum(values, self.ids, self.size)[self.ids]

    def peak(self, values: Tensor) -> Tensor:
        """Maximum over the trajectory's group: [N]."""
        return segment_max(values, self.ids, self.size)[self.ids]


def _groups(rewards: Tensor, group_ids: Tensor) -> _Groups:
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [N] with one N."
        )
    rewards = rewards.detach().double()
    ids, size = dense_ids(group_ids)
    usable = torch.isfinite(rewards)
    origin = segment_min(torch.where(usable, rewards, torch.inf), ids, size)[ids]
    origin = torch.where(torch.isfinite(origin), origin, 0.0)
    return _Groups(ids=ids, size=size, usable=usable, origin=origin, excess=torch.where(usable, rewards - origin, 0.0))


def _mean_excess(groups: _Groups, leave_one_out: bool) -> Tensor:
    count, total = groups.total(groups.usable.double()), groups.total(groups.excess)
    if leave_one_out:
        count, total = count - groups.usable.double(), total - groups.excess
    # Where no other trajectory is left to compare with, the baseline is the trajectory's own reward (excess 0).
    return torch.where(count > 0, total / count, 0.0)


def mean_baseline(rewards: Tensor, group_ids: Tensor, *, leave_one_out: bool = False) -> Tensor:
    """Mean reward of the group, or of the others in it.

    Args:
        rewards: [N].
        group_ids: [N] int64.
        leave_one_out: leave trajectory i out of its own baseline; a trajectory alone in its group gets its own reward,
            so that it contributes nothing.

    Returns:
        [N] fp64.

    Raises:
        ValueError: shapes that do not fit together.
    """
    groups = _groups(rewards, group_ids)
    return groups.origin + _mean_excess(groups, leave_one_out)


def _weighted_excess(groups: _Groups, log_energies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum e R', sum e and e itself, with e relative to the group's largest; sums are 0 where no energy is usable."""
    peak = groups.peak(log_energies)
    energies = torch.where(log_energies > -torch.inf, torch.exp(log_energies - peak), 0.0)
    return groups.total(energies * groups.excess), groups.total(energies), energies


def optimal_baseline_with_fallbacks(
    rewards: Tensor, log_energies: Tensor, group_ids: Tensor, *, leave_one_out: bool = False
) -> BaselineResult:
    """`optimal_baseline`, and a flag for every value that is a plain mean because no energy was usable."""
    groups = _groups(rewards, group_ids)
    if log_energies.shape != rewards.shape:
        raise ValueError(f"log_energies {tuple(log_energies.shape)} and rewards {tuple(rewards.shape)} differ.")
    log_e = log_energies.detach().double()
    # NaN and +inf cannot be used, and -inf is an energy of zero: none of them gets weight.
    log_e = torch.where(groups.usable & (log_e < torch.inf), log_e, -torch.inf)
    numerator, denominator, energies = _weighted_excess(groups, log_e)
    if leave_one_out:
        # Subtracting e_i from the sum is exact enough while the group's largest energy stays in. For the largest itself
        # the subtraction would cancel everything, so the others are summed anew, relative to the largest of them.
        order = torch.arange(log_e.numel(), device=log_e.device, dtype=torch.float64)
        holders = torch.where(log_e == groups.peak(log_e), order, -torch.inf)
        largest = order == groups.peak(holders)
        numerator_rest, denominator_rest, _ = _weighted_excess(groups, torch.where(largest, -torch.inf, log_e))
        numerator = torch.where(largest, numerator_rest, numerator - energies * groups.excess)
        denominator = torch.where(largest, denominator_rest, denominator - energies)
    fallback = ~(denominator > 0.0)
    excess = torch.where(fallback, _mean_excess(groups, leave_one_out), numerator / denominator)
    return BaselineResult(values=groups.origin + excess, fallback=fallback)


def optimal_baseline(
    rewards: Tensor, log_energies: Tensor, group_ids: Tensor, *, leave_one_out: bool = False
) -> Tensor:
    """b* = sum(e R) / sum(e) over the group: the baseline that minimizes sum e (R - b)^2.

    Args:
        rewards: [N].
        log_energies: [N] log e_i; -inf is an energy of zero, NaN and +inf are unusable and get no weight.
        group_ids: [N] int64.
        leave_one_out: leave trajectory i out of its own baseline (unbiased); a trajectory alone in its group gets its
            own reward, so that it contributes nothing.

    Returns:
        [N] fp64. Unchanged when a constant is added to all log energies of a group; exactly the rewards in a group of
        equal rewards; the plain mean (with leave_one_out: of the others) where no energy is usable.

    Raises:
        ValueError: shapes that do not fit together.

    Source: arXiv 2602.17616 (OPOB), with the importance weight entering once.
    """
    return optimal_baseline_with_fallbacks(rewards, log_energies, group_ids, leave_one_out=leave_one_out).values


def advantage_scales(rewards: Tensor, group_ids: Tensor, mode: Literal["none", "group-std", "minibatch-std"]) -> Tensor:
    """The factor of (reward - baseline): 1 / population standard deviation of the rewards.

    Args:
        rewards: [N] of the whole minibatch.
        group_ids: [N] int64.
        mode: 'none' gives 1; 'group-std' and 'minibatch-std' take the standard deviation over the group or the
            minibatch.

    Returns:
        [N] fp64; 0 where the rewards do not vary (a standard deviation under 1e-6 of the largest |reward|).

    Raises:
        ValueError: unknown mode, or shapes that do not fit together.
    """
    if mode not in ("none", "group-std", "minibatch-std"):
        raise ValueError(f"advantage_scales: mode must be 'none', 'group-std' or 'minibatch-std', not {mode!r}.")
    groups = _groups(rewards, torch.zeros_like(group_ids) if mode == "minibatch-std" else group_ids)
    if mode == "none":
        return torch.ones_like(groups.excess)
    centered = torch.where(groups.usable, groups.excess - _mean_excess(groups, leave_one_out=False), 0.0)
    deviation = (groups.total(centered.square()) / groups.total(groups.usable.double())).sqrt()
    magnitude = groups.peak(torch.where(groups.usable, rewards.detach().double().abs(), 0.0))
    return torch.where(deviation > _ROUNDING * magnitude, 1.0 / deviation, 0.0)
