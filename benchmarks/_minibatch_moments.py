"""Cut minibatches from a pool of trajectories, and compute moments of their gradients from inner products alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vcpo.objective import dense_ids


class Batches(NamedTuple):
    """A pool cut into minibatches of distinct prompts."""

    rows: Tensor  # [m, N]
    groups: Tensor  # [m, N] ids, distinct between minibatches


def cut(prompts: Tensor, *, group: int, groups: int, generator: torch.Generator) -> Batches:
    """Random minibatches of `groups` prompts with `group` responses each; no response occurs twice.

    Args:
        prompts: [n] ids; each prompt has equally many responses, a multiple of `group`.
        group: responses for each prompt in a minibatch.
        groups: prompts in a minibatch. Prompts left over are dropped, different ones each time.
        generator: for the random order.
    """
    ids, count = dense_ids(prompts)
    order = torch.randperm(len(ids), generator=generator)
    members = order[ids[order].argsort(stable=True)].view(count, -1, group)  # [prompts, rounds, group]
    rows = []
    for index in range(members.size(1)):
        chosen = torch.randperm(count, generator=generator)[: count // groups * groups]
        rows.append(members[chosen, index].view(-1, groups * group))
    batches = torch.cat(rows)
    return Batches(
        rows=batches, groups=torch.arange(batches.numel()).div(group, rounding_mode="floor").view_as(batches)
    )


class Sums(NamedTuple):
    """Inner products of the gradients x_k of m minibatches and their sum S, for several baselines."""

    squares: Tensor  # [baselines, m] |x_k|^2
    with_total: Tensor  # [baselines, m] x_k . S
    total: Tensor  # [baselines] |S|^2


class Moments(NamedTuple):
    """Unbiased estimates from m minibatches in column 0; in columns 1 to m, each leaves one minibatch out
    (jackknife)."""

    variance: Tensor  # [baselines, 1 + m] trace of the covariance of x
    signal: Tensor  # [baselines, 1 + m] |E x|^2; the estimate of a small value may be negative


def gradient_sums(gram: Tensor, batches: Tensor, coefficients: Tensor) -> Sums:
    """Sums of x_k = sum_i c_ki grad_i.

    Args:
        gram: [n, n] fp64 inner products of the trajectories' gradients.
        batches: [m, N] the trajectories of each minibatch, all distinct.
        coefficients: [baselines, m, N] fp64.
    """
    blocks = gram[batches[:, :, None], batches[:, None, :]]
    squares = ((coefficients.transpose(0, 1) @ blocks).transpose(0, 1) * coefficients).sum(-1)
    placed = coefficients.new_zeros(len(coefficients), len(gram))
    placed[:, batches.flatten()] = coefficients.flatten(1)
    with_gram = (placed @ gram)[:, batches.flatten()].view_as(coefficients)
    with_total = (coefficients * with_gram).sum(-1)
    return Sums(squares=squares, with_total=with_total, total=with_total.sum(-1))


def moments(sums: Sums) -> Moments:
    """Variance and squared mean of independent minibatch gradients."""
    m = sums.squares.size(1)
    squares = torch.cat([sums.squares.sum(1, keepdim=True), sums.squares.sum(1, keepdim=True) - sums.squares], 1)
    total = sums.total[:, None]
    totals = torch.cat([total, total - 2.0 * sums.with_total + sums.squares], 1)
    count = torch.full((1 + m,), m - 1.0, dtype=torch.float64)
    count[0] = m
    return Moments(
        variance=(squares - totals / count) / (count - 1.0), signal=(totals - squares) / (count * (count - 1.0))
    )


def means(values: Tensor) -> Tensor:
    """Means of [..., m]: [..., 1 + m], where columns 1 to m each leave one value out."""
    total = values.sum(-1, keepdim=True)
    return torch.cat([total / values.size(-1), (total - values) / (values.size(-1) - 1)], -1)


def standard_error(estimates: Tensor) -> Tensor:
    """Jackknife standard error [...] of estimates [cuts, ..., 1 + m] as in `Moments`.

    It is that of one cut of the pool, averaged over cuts; the mean of the cuts can only be more certain.
    """
    without_one = estimates[..., 1:]
    m = without_one.size(-1)
    variance = (m - 1.0) / m * (without_one - without_one.mean(-1, keepdim=True)).square().sum(-1)
    return variance.mean(0).sqrt()


def log_product(factors: Sequence[Tensor], powers: Sequence[float]) -> Tensor:
    """sum of power * log(factor) for estimates [cuts, ..., 1 + m], linearized around each factor's mean over the cuts.

    For standard errors: the logarithm itself would blow up if one cut's estimate came near 0.
    """
    return sum(
        (power * (factor / factor[..., :1].mean(0) - 1.0) for power, factor in zip(powers, factors)),
        torch.zeros_like(factors[0]),
    )


def ranks(values: Tensor) -> Tensor:
    """[n] fp64 ranks; equal values get their mean rank."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - 0.5 * (counts - 1.0) - 1.0).double()[inverse]


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of [n] and [n]; NaN if one does not vary."""
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())
