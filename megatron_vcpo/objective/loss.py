"""vcpo_loss: importance-weighted policy gradient with an optimal baseline, plus KL penalty and entropy bonus.

The minibatch loss is, over N trajectories i with response tokens t,

    -(1/N) sum_i k_i sum_t [ S(p_it, A_i) - kl_coefficient * KL_it + entropy_coefficient * H_it ]

with A_i = (R_i - b_i) * scale_i, k_i by the aggregation, and S = a * A_i * p_it for weight corrections (the gradient is
then the estimator of arXiv 2602.17616) or the clipped ratio times A_i for the others. KL and entropy stand beside the
advantage, never multiplied by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.objective.baseline import BaselineResult, mean_baseline, optimal_baseline_with_fallbacks
from megatron_vcpo.objective.corrections import (
    CORRECTIONS,
    AppliedWeights,
    LogRatios,
    applied_weights,
    clip_surrogate,
    log_bounds,
    log_ratios,
    sequence_log_applied,
    vetoed,
)
from megatron_vcpo.objective.energy import log_energies
from megatron_vcpo.objective.records import LossInputs, LossOutputs
from megatron_vcpo.objective.segments import segment_ids, segment_sum, spread
from megatron_vcpo.objective.usable import usable_trajectories

_K3_LINEAR_BEYOND = 20.0
"""The k3 estimator grows like ref/p; beyond exp(20) it goes on as its tangent, so that it cannot overflow."""


def length_normalizers(
    lengths: Tensor, config: VCPOConfig, *, num_trajectories: float, num_tokens: float, max_response_length: int
) -> Tensor:
    """k_i of config.aggregation: [n] fp64.

    Args:
        lengths: [n] masked-in tokens of each trajectory.
        config: its aggregation chooses 1/L_i, 1, 1/L_max or N/sum(L).
        num_trajectories: N, usable trajectories of the whole minibatch.
        num_tokens: sum of L over the whole minibatch.
        max_response_length: L_max.
    """
    lengths = lengths.double()
    if config.aggregation == "seq-mean-token-mean":
        return 1.0 / lengths.clamp(min=1.0)
    constant = {
        "seq-mean-token-sum": 1.0,
        "seq-mean-token-sum-norm": 1.0 / max(max_response_length, 1),
        "token-mean": max(num_trajectories, 1.0) / max(num_tokens, 1.0),
    }[config.aggregation]
    return torch.full_like(lengths, constant)


def trajectory_energies(
    *,
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    token_energies: Tensor | None,
    config: VCPOConfig,
) -> Tensor:
    """E_i for `trajectory_log_energies`: sum over tokens of the token's energy, times its squared weight where the
    correction weighs tokens one by one.

    Args:
        policy_logprobs: [T] nats; no gradient is taken.
        behavior_logprobs: [T].
        mask: [T] bool.
        cu_seqlens: [n + 1] int.
        token_energies: [T] ||onehot - softmax||^2 for config.energy 'logit'; ignored for 'length'.
        config: correction with its bounds, veto and energy.

    Returns:
        [n] fp64; 0 for a vetoed trajectory.

    Raises:
        ValueError: config.energy is 'logit' and token_energies is None, or config.energy is 'exact', whose baselines
            have to be computed by the caller.
    """
    ids = segment_ids(cu_seqlens, mask.numel())
    ratios = log_ratios(policy_logprobs, behavior_logprobs, mask, cu_seqlens)
    return _energies(ratios, applied_weights(ratios, config), ids, mask.bool(), token_energies, config)


def energy_token_weights(
    *, policy_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor, config: VCPOConfig
) -> Tensor:
    """Weights a_it such that E_i for `trajectory_log_energies` is the squared norm of grad sum_t a_it log p_it.

    They are those of a token-level correction, and 1 under a sequence-level one, whose weights enter later.

    Args:
        policy_logprobs: [T] nats; no gradient is taken.
        behavior_logprobs: [T].
        mask: [T] bool.
        cu_seqlens: [n + 1] int.
        config: correction with its bounds, and veto.

    Returns:
        [T] fp64; 0 where masked out, not finite, dropped, or of a vetoed trajectory.
    """
    ids = segment_ids(cu_seqlens, mask.numel())
    ratios = log_ratios(policy_logprobs, behavior_logprobs, mask, cu_seqlens)
    weights = torch.ones_like(ratios.token)
    if CORRECTIONS[config.correction].level == "token":
        weights = applied_weights(ratios, config).log_weights.exp()
    kept = mask.bool() & torch.isfinite(policy_logprobs.detach()) & spread(~vetoed(ratios, ids, config), ids)
    return torch.where(kept, weights, 0.0)


def _energies(
    ratios: LogRatios,
    weights: AppliedWeights,
    ids: Tensor,
    mask: Tensor,
    token_energies: Tensor | None,
    config: VCPOConfig,
) -> Tensor:
    if config.energy == "length":
        energies = torch.ones_like(ratios.token)
    elif config.energy == "logit" and token_energies is not None:
        energies = token_energies.detach().double()
    elif config.energy == "logit":
        raise ValueError("--vcpo-baseline opob with --vcpo-energy logit needs token_energies in the loss inputs.")
    else:
        raise ValueError("--vcpo-energy exact needs baselines in the loss inputs; they cannot be computed in the loss.")
    if CORRECTIONS[config.correction].level == "token":
        squares = torch.exp(2.0 * weights.log_weights)
        # A dropped token stays out whatever its energy: 0 * inf is NaN.
        energies = torch.where(squares > 0.0, squares * energies, 0.0)
    sums = segment_sum(torch.where(mask, energies, 0.0), ids, ratios.sequence.numel())
    return torch.where(vetoed(ratios, ids, config), 0.0, sums)


def trajectory_log_energies(
    *,
    log_weights: Tensor,
    lengths: Tensor,
    energies: Tensor,
    config: VCPOConfig,
    num_trajectories: float,
    num_tokens: float,
    max_response_length: int,
) -> Tensor:
    """log e_i, the weights of the optimal baseline: 2 log a_i + 2 log k_i + log E_i.

    Args:
        log_weights: [N] lam, from `sequence_log_weights`.
        lengths: [N] masked-in tokens.
        energies: [N] E_i from `trajectory_energies` (which holds the weights of token-level corrections and the veto).
        config: correction with its bounds, and aggregation.
        num_trajectories: N usable over the whole minibatch.
        num_tokens: sum of lengths over the whole minibatch.
        max_response_length: bound of a response.

    Returns:
        [N] fp64; -inf for an energy of zero, NaN where lam or E_i is not finite.
    """
    normalizers = length_normalizers(
        lengths,
        config,
        num_trajectories=num_trajectories,
        num_tokens=num_tokens,
        max_response_length=max_response_length,
    )
    log_e = log_energies(energies, sequence_log_applied(log_weights, lengths, config), normalizers.log())
    return torch.where(torch.isfinite(log_weights), log_e, torch.nan)


def trajectory_baselines_with_fallbacks(
    *,
    rewards: Tensor,
    group_ids: Tensor,
    log_energies: Tensor | None,
    config: VCPOConfig,
    usable: Tensor | None = None,
) -> BaselineResult:
    """`trajectory_baselines`, and where an optimal baseline fell back to the mean."""
    rewards = rewards.detach().double()
    if usable is not None:
        rewards = torch.where(usable.bool(), rewards, torch.nan)
    scope = torch.zeros_like(group_ids) if config.baseline_scope == "minibatch" else group_ids
    leave_one_out = config.baseline in ("leave-one-out", "opob-leave-one-out")
    if config.baseline in ("opob", "opob-leave-one-out"):
        if log_energies is None:
            raise ValueError(f"--vcpo-baseline {config.baseline} needs log_energies.")
        return optimal_baseline_with_fallbacks(rewards, log_energies, scope, leave_one_out=leave_one_out)
    values = torch.zeros_like(rewards)
    if config.baseline != "none":
        values = mean_baseline(rewards, scope, leave_one_out=leave_one_out)
    return BaselineResult(values=values, fallback=torch.zeros_like(rewards, dtype=torch.bool))


def trajectory_baselines(
    *,
    rewards: Tensor,
    group_ids: Tensor,
    log_energies: Tensor | None,
    config: VCPOConfig,
    usable: Tensor | None = None,
) -> Tensor:
    """Baselines by config.baseline and config.baseline_scope, for a caller whose scopes span micro-batches.

    Args:
        rewards: [N] of whole scopes.
        group_ids: [N] int64.
        log_energies: [N] from `trajectory_log_energies`; None where config.baseline needs none.
        config: baseline and scope.
        usable: [N] bool, False for trajectories left out of everything (lam not finite). Default: those with a finite
            reward.

    Returns:
        [N] fp64.

    Raises:
        ValueError: an optimal baseline without log_energies.
    """
    return trajectory_baselines_with_fallbacks(
        rewards=rewards, group_ids=group_ids, log_energies=log_energies, config=config, usable=usable
    ).values


@dataclass(frozen=True, kw_only=True, slots=True)
class _LossBatch:
    """The micro-batch with everything unusable taken out."""

    ids: Tensor  # [T] trajectory of a position, n for none
    mask: Tensor  # [T] bool, masked in and of a usable trajectory
    policy: Tensor  # [T] with gradient, 0 where mask is False
    usable: Tensor  # [n] bool
    lengths: Tensor  # [n] fp64, 0 where not usable
    ratios: LogRatios  # 0 where mask is False
    reference: Tensor | None  # [T], anything where mask is False
    entropy: Tensor | None  # [T] with gradient, anything where mask is False


def _prepare(inputs: LossInputs) -> _LossBatch:
    config, n = inputs.config, inputs.cu_seqlens.numel() - 1
    if config.kl_coefficient > 0.0 and inputs.reference_logprobs is None:
        raise ValueError("--vcpo-kl-coefficient above 0 needs reference_logprobs in the loss inputs.")
    if config.entropy_coefficient != 0.0 and inputs.entropy is None:
        raise ValueError("--vcpo-entropy-coefficient other than 0 needs entropy in the loss inputs.")
    ids = segment_ids(inputs.cu_seqlens, inputs.mask.numel())
    mask = inputs.mask.bool()
    usable = usable_trajectories(
        policy_logprobs=inputs.policy_logprobs,
        behavior_logprobs=inputs.behavior_logprobs,
        mask=mask,
        cu_seqlens=inputs.cu_seqlens,
        rewards=inputs.rewards,
        config=config,
        reference_logprobs=inputs.reference_logprobs,
        entropy=inputs.entropy,
    )
    mask = mask & spread(usable, ids)  # also drops padding

    # where on the way in, as in aggregate() on the way out: a NaN in between meets neither the value of the loss nor,
    # through 0 * NaN, its gradient.
    policy = torch.where(mask, inputs.policy_logprobs, 0.0)
    return _LossBatch(
        ids=ids,
        mask=mask,
        policy=policy.float() if policy.dtype in (torch.float16, torch.bfloat16) else policy,
        usable=usable,
        lengths=segment_sum(mask.double(), ids, n),
        ratios=log_ratios(inputs.policy_logprobs, inputs.behavior_logprobs, mask, inputs.cu_seqlens),
        reference=inputs.reference_logprobs,
        entropy=inputs.entropy,
    )


def _baselines(inputs: LossInputs, batch: _LossBatch, weights: AppliedWeights) -> BaselineResult:
    config = inputs.config
    if inputs.baselines is not None:
        return BaselineResult(values=inputs.baselines.detach().double(), fallback=torch.zeros_like(batch.usable))
    log_e = None
    if config.baseline in ("opob", "opob-leave-one-out"):
        log_e = trajectory_log_energies(
            log_weights=batch.ratios.sequence,
            lengths=batch.lengths,
            energies=_energies(batch.ratios, weights, batch.ids, batch.mask, inputs.token_energies, config),
            config=config,
            num_trajectories=inputs.num_trajectories,
            num_tokens=inputs.num_tokens,
            max_response_length=inputs.max_response_length,
        )
    return trajectory_baselines_with_fallbacks(
        rewards=inputs.rewards, group_ids=inputs.group_ids, log_energies=log_e, config=config, usable=batch.usable
    )


def _surrogate(batch: _LossBatch, weights: AppliedWeights, advantages: Tensor, config: VCPOConfig) -> Tensor:
    """Per-token objective [T], to be maximized."""
    correction, dtype = CORRECTIONS[config.correction], batch.policy.dtype
    token_advantages = spread(advantages, batch.ids).to(dtype)
    if correction.surrogate == "clip":
        log_ratio = batch.ratios.token if correction.level == "token" else spread(batch.ratios.mean, batch.ids)
        return clip_surrogate(batch.policy, log_ratio, token_advantages, *log_bounds(config))
    weight = weights.log_weights.exp()
    token_weights = weight if correction.level == "token" else spread(weight, batch.ids)
    return token_weights.to(dtype) * token_advantages * batch.policy


def kl_estimate(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) as a loss term: [T], differentiable in policy_logprobs.

    With l = log p/ref: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l. On the policy's own samples k1 and k3 are unbiased
    values; of the gradients k2's is that of the KL, k1's is zero on average (it only adds noise), and k3's is that of
    the forward KL(reference || policy).

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio = policy_logprobs - reference_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    exponent = -log_ratio
    near = exponent <= _K3_LINEAR_BEYOND
    ratio = torch.exp(torch.where(near, exponent, 0.0))
    tangent = math.exp(_K3_LINEAR_BEYOND) * (1.0 + exponent - _K3_LINEAR_BEYOND)
    return torch.where(near, ratio, tangent) - 1.0 + log_ratio


def vcpo_loss(inputs: LossInputs) -> LossOutputs:
    """The loss of one packed micro-batch.

    A trajectory with a non-finite reward or a non-finite masked-in log-prob (also of the reference, or entropy, where
    they enter the loss) is left out of the loss, the baselines and all metrics but `nonfinite_trajectories`. An empty
    response contributes nothing to the gradient. A weight of 0 (dropped by a mask correction or the veto) takes the
    trajectory out of the policy gradient, not out of N.

    Raises:
        ValueError: an input that the configuration needs is None.

    Source: arXiv 2602.17616.
    """
    config, batch = inputs.config, _prepare(inputs)
    weights = applied_weights(batch.ratios, config)
    dropped = vetoed(batch.ratios, batch.ids, config)
    baselines = _baselines(inputs, batch, weights)
    advantages = (inputs.rewards.detach().double() - baselines.values) * inputs.advantage_scales.detach().double()
    normalizers = length_normalizers(
        batch.lengths,
        config,
        num_trajectories=inputs.num_trajectories,
        num_tokens=inputs.num_tokens,
        max_response_length=inputs.max_response_length,
    ) / max(inputs.num_trajectories, 1.0)

    def aggregate(token_values: Tensor) -> Tensor:
        shares = spread(normalizers, batch.ids).to(token_values.dtype)
        total = (shares * torch.where(batch.mask, token_values, 0.0)).sum(dtype=torch.float64)
        return total.to(token_values.dtype)

    kept_advantages = torch.where(dropped, 0.0, advantages)
    policy_loss = -aggregate(_surrogate(batch, weights, kept_advantages, config))
    loss, kl = policy_loss, None
    if batch.reference is not None:
        kl = kl_estimate(batch.policy, batch.reference, config.kl_estimator)
        if config.kl_coefficient > 0.0:
            loss = loss + config.kl_coefficient * aggregate(kl)
    if batch.entropy is not None and config.entropy_coefficient != 0.0:
        loss = loss - config.entropy_coefficient * aggregate(batch.entropy)
    return LossOutputs(
        loss=loss, metrics=_metrics(inputs, batch, weights, dropped, baselines, advantages, kl, policy_loss)
    )


def _metrics(
    inputs: LossInputs,
    batch: _LossBatch,
    weights: AppliedWeights,
    dropped: Tensor,
    baselines: BaselineResult,
    advantages: Tensor,
    kl: Tensor | None,
    policy_loss: Tensor,
) -> dict[str, Tensor]:
    """(sum, count) of everything measured, fp64."""

    def over(values: Tensor | None, where: Tensor) -> Tensor:
        if values is None:
            return torch.zeros(2, dtype=torch.float64, device=where.device)
        values = values.detach().double()
        where = where & torch.isfinite(values)
        kept = torch.where(where, values, 0.0)
        return torch.stack([kept.sum(), where.double().sum()])

    nonempty = batch.usable & (batch.lengths > 0.0)
    weighed = batch.mask if CORRECTIONS[inputs.config.correction].level == "token" else nonempty
    log_ratio = batch.ratios.token
    everything = torch.ones_like(batch.usable)
    share = batch.usable.sum().double() / max(inputs.num_trajectories, 1.0)
    applied = spread(~dropped, batch.ids) if weighed is batch.mask else ~dropped
    return {
        # Already divided by the minibatch's N; the counts of all micro-batches add up to 1.
        "pg_loss": torch.stack([policy_loss.detach().double(), share]),
        "reward": over(inputs.rewards, batch.usable),
        "baseline": over(baselines.values, batch.usable),
        "advantage_abs": over(advantages.abs(), batch.usable),
        "weight": over(weights.log_weights.exp() * applied, weighed),
        "weight_clipped": over(weights.altered, weighed),
        "mismatch_abs": over(log_ratio.abs(), batch.mask),
        "mismatch_k3": over(kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3"), batch.mask),
        "entropy": over(batch.entropy, batch.mask),
        "kl": over(kl, batch.mask),
        "nonfinite_trajectories": over(~batch.usable, everything),
        # Shares of all trajectories, so that times N they are counts.
        "vetoed": over(dropped & batch.usable, everything),
        "baseline_fallbacks": over(baselines.fallback & batch.usable, everything),
        "response_length": over(batch.lengths, batch.usable),
    }
