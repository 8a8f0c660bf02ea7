"""Importance corrections: what weight each one applies to which log-prob (formulas and sources: docs/corrections.md).

Each correction is one function from log-ratios to applied log-weights, all in log space: a bound is put on the
logarithm before exp is taken, so nothing overflows. `CORRECTIONS` is their table.

Two surrogates use the weights: 'weight' is A * a * log p with a constant a; 'clip' is min(r A, clip(r) A), whose
gradient flows through the ratio r.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_vcpo.config import MASK_BOUNDS, ConfigError, VCPOConfig
from megatron_vcpo.objective.importance import masked_log_ratio
from megatron_vcpo.objective.segments import segment_ids, segment_sum

MAX_LOG_WEIGHT = 20.0
"""No weight or ratio exceeds exp(20), whatever the bounds say: a larger one is a numerical accident."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRatios:
    """Log-ratios policy - behaviour of one packed micro-batch, fp64, without gradient."""

    token: Tensor  # [T], 0 at masked-out positions
    sequence: Tensor  # [n], sum over the trajectory's tokens
    mean: Tensor  # [n], the same divided by the number of tokens (0 for an empty response)


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedWeights:
    """Weights of a correction, [T] for token-level ones, [n] for sequence-level ones."""

    log_weights: Tensor  # fp64, without gradient; -inf where dropped
    altered: Tensor  # bool, True where a bound changed or dropped the weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """One row of the table."""

    level: Literal["token", "sequence"]  # whether `apply` weights tokens or whole sequences
    surrogate: Literal["weight", "clip"]
    bounds: Literal["ratio", "distance"]  # the settings bound the ratio itself, or its distance from 1
    lower: float  # default of --vcpo-correction-lower
    upper: float  # default of --vcpo-correction-upper
    apply: Callable[[LogRatios, float, float], AppliedWeights]  # (log-ratios, log lower bound, log upper bound)


def _truncate(log_ratio: Tensor, upper: float) -> AppliedWeights:
    return AppliedWeights(log_weights=log_ratio.clamp(max=upper), altered=log_ratio > upper)


def _drop_outside(log_ratio: Tensor, lower: float, upper: float) -> AppliedWeights:
    outside = (log_ratio < lower) | (log_ratio > upper)
    return AppliedWeights(log_weights=torch.where(outside, -torch.inf, log_ratio), altered=outside)


def _clip(log_ratio: Tensor, lower: float, upper: float) -> AppliedWeights:
    outside = (log_ratio < lower) | (log_ratio > upper)
    return AppliedWeights(log_weights=log_ratio.clamp(min=lower, max=upper), altered=outside)


def no_correction(ratios: LogRatios, lower: float, upper: float) -> AppliedWeights:
    """a_i = 1: the behaviour's samples are treated as the policy's own."""
    return AppliedWeights(
        log_weights=torch.zeros_like(ratios.sequence), altered=torch.zeros_like(ratios.sequence, dtype=torch.bool)
    )


def token_tis(ratios: LogRatios, lower: float, upper: float) -> AppliedWeights:
    """a_it = min(r_it, c): truncated importance sampling of tokens."""
    return _truncate(ratios.token, upper)


def sequence_tis(ratios: LogRatios, lower: float, upper: float) -> AppliedWeights:
    """a_i = min(w_i, c): truncated importance sampling of sequences."""
    return _truncate(ratios.sequence, upper)


def token_mis(ratios: LogRatios, lower: float, upper: float) -> AppliedWeights:
    """a_it = r_it within the bounds, else 0: masked importance sampling of tokens."""
    return _drop_outside(ratios.token, lower, upper)


def sequence_mis(ratios: LogRatios, lower: float, upper: float) -> AppliedWeights:
    """a_i = w_i within the bounds, else 0: masked importance sampling of sequences."""
    return _drop_outside(ratios.sequence, lower, upper)


def geometric_mis(ratios: LogRatios, lower: float, upper: float) -> AppliedWeights:
    """a_i = exp(mean_t d_it) within the bounds, else 0: masked importance sampling by the geometric mean ratio."""
    return _drop_outside(ratios.mean, lower, upper)


def icepop(ratios: LogRatios, lower: float, upper: float) -> AppliedWeights:
    """a_it = r_it within [0.5, 5], else 0."""
    return _drop_outside(ratios.token, lower, upper)


def cispo(ratios: LogRatios, lower: float, upper: float) -> AppliedWeights:
    """a_it = clip(r_it, 1 - low, 1 + high), taken as a constant, so that clipped tokens keep their gradient."""
    return _clip(ratios.token, lower, upper)


def gspo(ratios: LogRatios, lower: float, upper: float) -> AppliedWeights:
    """s_i = exp(mean_t d_it), clipped to [1 - low, 1 + high]; the gradient flows through s_i."""
    return _clip(ratios.mean, lower, upper)


def ppo_clip(ratios: LogRatios, lower: float, upper: float) -> AppliedWeights:
    """r_it clipped to [1 - low, 1 + high]; the gradient flows through r_it."""
    return _clip(ratios.token, lower, upper)


def _row(
    apply: Callable[[LogRatios, float, float], AppliedWeights],
    level: Literal["token", "sequence"],
    lower: float,
    upper: float,
    *,
    bounds: Literal["ratio", "distance"] = "ratio",
    surrogate: Literal["weight", "clip"] = "weight",
) -> Correction:
    return Correction(apply=apply, level=level, lower=lower, upper=upper, bounds=bounds, surrogate=surrogate)


CORRECTIONS: dict[str, Correction] = {
    "none": _row(no_correction, "sequence", 0.0, math.inf),
    "token-tis": _row(token_tis, "token", 0.0, 8.0),
    "sequence-tis": _row(sequence_tis, "sequence", 0.0, 8.0),
    "token-mis": _row(token_mis, "token", *MASK_BOUNDS["token-mis"]),
    "sequence-mis": _row(sequence_mis, "sequence", *MASK_BOUNDS["sequence-mis"]),
    "geometric-mis": _row(geometric_mis, "sequence", *MASK_BOUNDS["geometric-mis"]),
    "icepop": _row(icepop, "token", *MASK_BOUNDS["icepop"]),
    "cispo": _row(cispo, "token", 1.0, 4.0, bounds="distance"),
    "gspo": _row(gspo, "sequence", 3e-4, 4e-4, bounds="distance", surrogate="clip"),
    "ppo-clip": _row(ppo_clip, "token", 0.2, 0.28, bounds="distance", surrogate="clip"),
}


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf


def log_bounds(config: VCPOConfig) -> tuple[float, float]:
    """Logarithms of the bounds of the ratio under config.correction; the upper one at most MAX_LOG_WEIGHT."""
    correction = CORRECTIONS[config.correction]
    lower = correction.lower if config.correction_lower is None else config.correction_lower
    upper = correction.upper if config.correction_upper is None else config.correction_upper
    if correction.bounds == "distance":
        lower, upper = 1.0 - lower, 1.0 + upper
    return _log(lower), min(_log(upper), MAX_LOG_WEIGHT)


def log_ratios(policy_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> LogRatios:
    """Log-ratios of tokens [T] and trajectories [n] of packed log-probs [T] (nats), without gradient."""
    ids, count = segment_ids(cu_seqlens, mask.numel()), cu_seqlens.numel() - 1
    token = masked_log_ratio(policy_logprobs.detach(), behavior_logprobs.detach(), mask)
    sequence = segment_sum(token, ids, count)
    lengths = segment_sum(mask.double(), ids, count)
    return LogRatios(token=token, sequence=sequence, mean=sequence / lengths.clamp(min=1.0))


def applied_weights(ratios: LogRatios, config: VCPOConfig) -> AppliedWeights:
    """Weights of config.correction; a ratio that is not finite is dropped (weight 0), never truncated to the bound."""
    correction = CORRECTIONS[config.correction]
    weights = correction.apply(ratios, *log_bounds(config))
    finite = torch.isfinite(ratios.token if correction.level == "token" else ratios.sequence)
    return AppliedWeights(
        log_weights=torch.where(finite, weights.log_weights, -torch.inf), altered=weights.altered | ~finite
    )


def sequence_log_applied(log_weights: Tensor, lengths: Tensor, config: VCPOConfig) -> Tensor:
    """log a_i of a sequence-level correction from lam [n] and token counts [n]; 0 for a token-level one. [n] fp64."""
    lam = log_weights.detach().double()
    if CORRECTIONS[config.correction].level == "token":
        return torch.zeros_like(lam)
    ratios = LogRatios(token=lam, sequence=lam, mean=lam / lengths.double().clamp(min=1.0))
    return applied_weights(ratios, config).log_weights


def vetoed(ratios: LogRatios, ids: Tensor, config: VCPOConfig) -> Tensor:
    """[n] bool: the trajectory has a token whose ratio is below config.veto_ratio; all False if that is 0."""
    below = ratios.token < _log(config.veto_ratio)
    return segment_sum(below.double(), ids, ratios.sequence.numel()) > 0.0


def ess_log_weights(log_weights: Tensor, config: VCPOConfig) -> Tensor:
    """Log-weights [N] fp64 from which rho is computed: raw, or capped at the correction's upper bound.

    Raises:
        ConfigError: 'capped' with a correction that has no upper bound of its own.
    """
    lam = log_weights.detach().double()
    if config.ess_weights == "raw":
        return lam
    if config.correction == "none" and config.correction_upper is None:
        raise ConfigError("--vcpo-ess-weights capped with --vcpo-correction none needs --vcpo-correction-upper.")
    # Only finite values are capped: capping +inf would make it look like an ordinary large weight.
    return torch.where(torch.isfinite(lam), lam.clamp(max=log_bounds(config)[1]), lam)


def clip_surrogate(
    policy_logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, lower: float, upper: float
) -> Tensor:
    """min(r A, clip(r) A) for each token, with the gradient of r A where the minimum is r A, and none where it is
    clipped.

    Args:
        policy_logprobs: [T] with gradient.
        log_ratio: [T] log r without gradient (of the token or of its sequence).
        advantages: [T].
        lower: log of the lower bound of r.
        upper: log of the upper bound of r.

    Returns:
        [T]. A ratio above exp(MAX_LOG_WEIGHT) counts as exp(MAX_LOG_WEIGHT) and has no gradient.

    Source: arXiv 1707.06347 (PPO), 2503.14476 (two bounds), 2507.18071 (GSPO's token form: s_i * p / stopgrad(p)).
    """
    bounded = torch.where(advantages >= 0.0, log_ratio.clamp(max=upper), log_ratio.clamp(min=lower, max=MAX_LOG_WEIGHT))
    ratio = bounded.exp().to(policy_logprobs.dtype)
    # The second factor is 1 and gives r the gradient r * grad log p.
    through = ratio * torch.exp(policy_logprobs - policy_logprobs.detach())
    return advantages * torch.where(bounded == log_ratio, through, ratio)
