"""Effective sample size of importance weights, and the learning-rate multiplier derived from it.

Weights are compared in log space, so that no log-weight can overflow, and everything fails closed: bad data gives the
floor step, never a full one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ess_statistics(log_weights: Tensor) -> Tensor:
    """What one shard contributes to the effective sample size.

    Args:
        log_weights: [N], any float dtype; may be empty. Non-finite entries are excluded.

    Returns:
        [4] fp64: maximum, sum exp(lam - maximum), sum exp(2 (lam - maximum)), number of finite entries;
        (-inf, 0, 0, 0) when there is none. Shards are merged by `combine_ess_statistics`.
    """
    lam = log_weights.detach().double().flatten()
    usable = torch.isfinite(lam)
    # The appended -inf gives an empty shard a maximum.
    peak = torch.cat([torch.where(usable, lam, -torch.inf), lam.new_full((1,), -torch.inf)]).max()
    weights = torch.where(usable, torch.exp(lam - peak), 0.0)
    return torch.stack([peak, weights.sum(), weights.square().sum(), usable.sum().double()])


def combine_ess_statistics(stats: Tensor) -> Tensor:
    """Effective sample size of all shards together.

    Args:
        stats: [R, 4] fp64, one row of `ess_statistics` for each shard.

    Returns:
        fp64 scalar in [1/N, 1] with N the number of finite log-weights; 0 when N is 0; NaN if a row holds NaN.

    Source: rho = (sum w)^2 / (N sum w^2), arXiv 2602.17616.
    """
    peaks, sums, squares, counts = stats.double().unbind(-1)
    peak = peaks.max()
    shift = torch.exp(peaks - peak)  # NaN only where every shard is empty, and count is 0
    count = counts.sum()
    total, square = (sums * shift).sum(), (squares * shift.square()).sum()
    rho = total.square() / (count * square)
    # Rounding may exceed 1 by an ulp; clamp passes NaN on.
    return torch.where(count == 0, 0.0, rho.clamp(max=1.0))


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """rho = (sum w)^2 / (N sum w^2) with w = exp(log_weights).

    Args:
        log_weights: [N], any float dtype. Non-finite entries are excluded and not counted in N.

    Returns:
        fp64 scalar in [1/N, 1]; 1 when all weights are equal; unchanged when a constant is added to all log-weights;
        0 when no entry is usable.

    Raises:
        ValueError: log_weights is empty.

    Source: arXiv 2602.17616.
    """
    if log_weights.numel() == 0:
        raise ValueError("effective_sample_size: log_weights is empty; there is no trajectory to weigh.")
    return combine_ess_statistics(ess_statistics(log_weights)[None])


def learning_rate_multiplier(
    rho: float | Tensor, reference: float = 1.0, exponent: float = 0.5, floor: float = 0.0
) -> float:
    """Factor of one step's learning rate: clamp(rho / reference, floor, 1) ** exponent.

    Args:
        rho: effective sample size, dimensionless; a scalar tensor is read on the host.
        reference: rho at or above which the step has the schedule's full learning rate.
        exponent: 0.5 for Adam-like optimizers, 1 for plain gradient descent.
        floor: lower bound of rho / reference, in [0, 1].

    Returns:
        A number in [0, 1]. A NaN or infinite rho counts as 0 and gives floor ** exponent.

    Raises:
        ValueError: reference or exponent not positive and finite, or floor outside [0, 1].

    Source: arXiv 2602.17616.
    """
    if not (math.isfinite(reference) and reference > 0.0):
        raise ValueError(f"learning_rate_multiplier: reference must be positive and finite, not {reference}.")
    if not (math.isfinite(exponent) and exponent > 0.0):
        # An exponent of 0 would turn rho = 0 into a full step.
        raise ValueError(f"learning_rate_multiplier: exponent must be positive and finite, not {exponent}.")
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"learning_rate_multiplier: floor must lie in [0, 1], not {floor}.")
    value = float(rho)
    if not math.isfinite(value):
        value = 0.0  # min(1.0, nan) is 1.0 in Python: a NaN would be a full step
    return float(min(max(value / reference, floor), 1.0) ** exponent)
