"""The factors of each trajectory in the gradient: normalizers, energies, baselines.

The loss calls these on a micro-batch that holds whole scopes; where scopes span micro-batches or ranks, a scoring pass
calls them on the whole minibatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.objective.baseline import BaselineResult, mean_baseline, optimal_baseline_with_fallbacks
from megatron_vcpo.objective.corrections import (
    CORRECTIONS,
    AppliedWeights,
    LogRatios,
    applied_weights,
    log_ratios,
    sequence_log_applied,
    vetoed,
)
from megatron_vcpo.objective.energy import log_energies
from megatron_vcpo.objective.segments import segment_ids, segment_sum, spread


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
    """E_i for `trajectory_log_energies`: sum over tokens of the token's energy, times its squared weight under a
    token-level correction.

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
    return energy_sums(ratios, applied_weights(ratios, config), ids, mask.bool(), token_energies, config)


def energy_token_weights(
    *, policy_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor, config: VCPOConfig
) -> Tensor:
    """Weights a_it such that E_i for `trajectory_log_energies` is the squared norm of grad sum_t a_it log p_it.

    They are the weights of a token-level correction, and 1 under a sequence-level one, whose weights enter
    `trajectory_log_energies` themselves.

    Args:
        policy_logprobs: [T] nats; no gradient is taken.
        behavior_logprobs: [T].
        mask: [T] bool.
        cu_seqlens: [n + 1] int.
        config: correction with its bounds, and veto.

    Returns:
        [T] fp64; 0 for a token that is masked out, not finite, dropped, or in a vetoed trajectory.
    """
    ids = segment_ids(cu_seqlens, mask.numel())
    ratios = log_ratios(policy_logprobs, behavior_logprobs, mask, cu_seqlens)
    weights = torch.ones_like(ratios.token)
    if CORRECTIONS[config.correction].level == "token":
        weights = applied_weights(ratios, config).log_weights.exp()
    kept = mask.bool() & torch.isfinite(policy_logprobs.detach()) & spread(~vetoed(ratios, ids, config), ids)
    return torch.where(kept, weights, 0.0)


def energy_sums(
    ratios: LogRatios,
    weights: AppliedWeights,
    ids: Tensor,
    mask: Tensor,
    token_energies: Tensor | None,
    config: VCPOConfig,
) -> Tensor:
    """E_i [n] fp64, like `trajectory_energies`, for a caller that already has the ratios and weights."""
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
        max_response_length: longest response allowed.

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
    """`trajectory_baselines`, and a flag where an optimal baseline fell back to the mean."""
    rewards = rewards.detach().double()
    if usable is not None:
        rewards = torch.where(usable.bool(), rewards, torch.nan)
    scope = torch.zeros_like(group_ids) if config.baseline_scope == "minibatch" else group_ids
    leave_one_out = config.baseline in ("leave-one-out", "opob-leave-one-out")
    if config.baseline in ("opob", "opob-leave-one-out"):
        if log_energies is None:
            raise ValueError(f"--vcpo-baseline {config.baseline} needs log_energies.")
        return optimal_baseline_with_fallbacks(rewards, log_energies, scope, leave_one_out=leave_one_out)
    if config.baseline == "none":
        values = torch.zeros_like(rewards)
    elif config.baseline in ("mean", "leave-one-out"):
        values = mean_baseline(rewards, scope, leave_one_out=leave_one_out)
    else:
        raise ValueError(f"--vcpo-baseline {config.baseline} is not computed anywhere.")
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
        rewards: [N], covering whole scopes.
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
