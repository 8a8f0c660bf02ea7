"""Compare baselines on minibatches of a pool of measured trajectories, and proxy energies with exact ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks._minibatch_moments import (
    Batches,
    Moments,
    correlation,
    gradient_sums,
    log_product,
    means,
    moments,
    ranks,
    standard_error,
)
from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.objective import advantage_scales, mean_baseline, optimal_baseline, trajectory_log_energies


class Setting(NamedTuple):
    """Flags of the plugin that change what multiplies a trajectory's gradient."""

    aggregation: str
    reward_normalization: str


SETTINGS = (
    Setting("seq-mean-token-mean", "group-std"),  # the plugin's defaults
    Setting("seq-mean-token-mean", "none"),
    Setting("seq-mean-token-sum", "none"),
)
REFERENCE = ("mean", "group")  # the baseline that variances are compared with


# ------------------------------------------------------------------ trajectories and baselines


@dataclass(frozen=True, kw_only=True)
class Pool:
    """n responses, equally many for each prompt, all measured under one policy."""

    gram: Tensor  # [n, n] fp64 inner products of grad sum_t log p
    logit_energies: Tensor  # [n]
    lengths: Tensor  # [n] response tokens
    rewards: Tensor  # [n]
    prompts: Tensor  # [n] ids
    log_weights: Tensor  # [n] log of policy over behaviour
    along: dict[Setting, Tensor]  # [n] fp64 each: component of grad sum_t log p along the true gradient

    def energies(self, kind: str) -> Tensor:
        """[n] fp64 E_i of `trajectory_log_energies`."""
        exact = self.gram.diagonal()
        return {"exact": exact, "logit": self.logit_energies, "length": self.lengths}[kind].double()

    def log_energies(self, kind: str, aggregation: str) -> Tensor:
        """[n] log e_i."""
        return log_energies(self.energies(kind), self.log_weights, self.lengths, aggregation)


def log_energies(energies: Tensor, log_weights: Tensor, lengths: Tensor, aggregation: str) -> Tensor:
    """[n] log e_i = 2 log a_i + 2 log k_i + log E_i with the default correction."""
    return trajectory_log_energies(
        log_weights=log_weights,
        lengths=lengths,
        energies=energies,
        config=VCPOConfig(aggregation=aggregation),
        num_trajectories=float(len(lengths)),
        num_tokens=float(lengths.sum()),
        max_response_length=int(lengths.max()),
    )


def applied_factors(log_weights: Tensor, lengths: Tensor, aggregation: str) -> Tensor:
    """[n] fp64 a_i k_i."""
    return (0.5 * log_energies(torch.ones_like(log_weights), log_weights, lengths, aggregation)).exp()


Method = tuple[str, str]  # baseline and scope
_ENERGIES = ("length", "logit", "exact")
_WITH_OWN_REWARD = ("mean", *(f"opob, {kind}" for kind in _ENERGIES))
METHODS: tuple[Method, ...] = (
    ("none", ""),
    *((name, "group") for name in ("mean", "leave-one-out", *_WITH_OWN_REWARD[1:])),
    *((name, "group") for name in ("opob-leave-one-out, logit", "opob-leave-one-out, exact")),
    *((name, "minibatch") for name in _WITH_OWN_REWARD),
    ("oracle: best constant", "all"),
    ("oracle: opob-leave-one-out, exact, over all of a prompt's responses", "pool"),
)


def without_own_reward(method: Method) -> Method:
    """The leave-one-out form of a baseline; the method itself if it has that form already."""
    name, scope = method
    if name not in _WITH_OWN_REWARD:
        return method
    return ("leave-one-out" if name == "mean" else name.replace("opob", "opob-leave-one-out")), scope


def baseline_values(method: Method, pool: Pool, batches: Batches, aggregation: str, constant: float = 0.0) -> Tensor:
    """[m, N] fp64 baselines of a method; `constant` is the oracle's."""
    name, scope = method
    if name == "none":
        return torch.zeros(batches.rows.shape, dtype=torch.float64)
    if name == "oracle: best constant":
        return torch.full(batches.rows.shape, constant, dtype=torch.float64)
    if name.startswith("oracle"):
        log_e = pool.log_energies("exact", aggregation)
        return optimal_baseline(pool.rewards, log_e, pool.prompts, leave_one_out=True)[batches.rows]
    rows = batches.rows.flatten()
    ids = batches.groups if scope == "group" else torch.arange(len(batches.rows))[:, None].expand_as(batches.rows)
    rewards, ids, leave_one_out = pool.rewards[rows], ids.flatten(), "leave-one-out" in name
    if not name.startswith("opob"):
        return mean_baseline(rewards, ids, leave_one_out=leave_one_out).view_as(batches.rows)
    log_e = pool.log_energies(name.split(", ")[1], aggregation)[rows]
    return optimal_baseline(rewards, log_e, ids, leave_one_out=leave_one_out).view_as(batches.rows)


def coefficients(pool: Pool, batches: Batches, baselines: Tensor, setting: Setting) -> Tensor:
    """[..., m, N] a_i k_i (R_i - b_i) scale_i / N for baselines of that shape."""
    factors = applied_factors(pool.log_weights, pool.lengths, setting.aggregation)[batches.rows]
    rewards = pool.rewards[batches.rows]
    scales = advantage_scales(rewards.flatten(), batches.groups.flatten(), setting.reward_normalization)
    return factors * scales.view_as(factors) * (rewards - baselines) / batches.rows.size(1)


def best_constant(pool: Pool, cuts: Sequence[Batches], setting: Setting) -> float:
    """The constant with the least variance, found from three constants because the variance is quadratic in it."""
    constants = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)[:, None, None]
    variance = torch.zeros(3, dtype=torch.float64)
    for batches in cuts:
        c = coefficients(pool, batches, constants.expand(3, *batches.rows.shape), setting)
        variance += moments(gradient_sums(pool.gram, batches.rows, c)).variance[:, 0]
    at_zero, at_one, at_minus_one = variance.tolist()
    curvature = 0.5 * (at_one + at_minus_one) - at_zero
    return (at_minus_one - at_one) / (4.0 * curvature) if curvature > 0.0 else 0.0


# ------------------------------------------------------------------ what is reported


class Estimate(NamedTuple):
    """A number and its standard error."""

    value: float
    error: float = 0.0


class Comparison(NamedTuple):
    """The figures of one baseline; see baseline_variance.py for their meaning."""

    variance: Estimate
    noise: Estimate
    squared_bias: Estimate


def compare(pool: Pool, cuts: Sequence[Batches], setting: Setting) -> dict[Method, Comparison]:
    """Figures of every baseline, on the same minibatches."""
    constant = best_constant(pool, cuts, setting)
    found: list[Moments] = []
    useful = []
    for batches in cuts:

        def rows(methods: Sequence[Method], batches: Batches = batches) -> Tensor:
            values = [baseline_values(method, pool, batches, setting.aggregation, constant) for method in methods]
            return coefficients(pool, batches, torch.stack(values), setting)

        c = rows(METHODS)
        own = c - rows([without_own_reward(method) for method in METHODS])
        found.append(moments(gradient_sums(pool.gram, batches.rows, torch.cat([c, own]))))
        useful.append(means((c * pool.along[setting][batches.rows]).sum(-1)))
    variance, (signal, shift) = (
        torch.stack([f.variance for f in found])[:, : len(METHODS)],
        torch.stack([f.signal for f in found]).split(len(METHODS), 1),
    )
    along, base, unbiased = torch.stack(useful), METHODS.index(REFERENCE), METHODS.index(without_own_reward(REFERENCE))

    def against_base(factors: Sequence[Tensor], powers: Sequence[float]) -> tuple[Tensor, Tensor]:
        bases = [factor[:, [base]].expand_as(factor) for factor in factors]
        value = torch.ones(len(METHODS), dtype=torch.float64)
        for factor, power in zip(factors, powers):
            value = value * (factor[..., 0].mean(0) / factor[:, base, 0].mean()) ** power
        return value, value * standard_error(log_product([*factors, *bases], [*powers, *(-power for power in powers)]))

    length = signal[..., 0].mean(0)[unbiased]
    bias = shift[..., 0].mean(0) / length
    bias_error = standard_error(shift - bias[:, None] * signal[:, [unbiased]]) / length.abs()
    columns = (*against_base([variance], [1.0]), *against_base([variance, along], [1.0, -2.0]), bias, bias_error)
    return {
        method: Comparison(Estimate(v, ve), Estimate(n, ne), Estimate(b, be))
        for method, v, ve, n, ne, b, be in zip(METHODS, *(column.tolist() for column in columns))
    }


def proxy_quality(pool: Pool, cuts: Sequence[Batches], kind: str) -> dict[str, float]:
    """Correlations of log E with the exact log E: over all prompts, and the mean over groups in which both vary."""
    exact, proxy = pool.energies("exact").log(), pool.energies(kind).log()
    out = {"pearson": correlation(exact, proxy), "spearman": correlation(ranks(exact), ranks(proxy))}
    group = int((cuts[0].groups == cuts[0].groups[0, 0]).sum())
    rows = cuts[0].rows.view(-1, group)
    for name, of in (("pearson", Tensor.double), ("spearman", ranks)):
        values = [correlation(of(exact[row]), of(proxy[row])) for row in rows]
        usable = [value for value in values if value == value]
        out[f"{name} in groups"] = statistics.fmean(usable) if usable else float("nan")
    return out
