"""vcpo_loss: importance-weighted policy gradient with an optimal baseline, plus KL penalty and entropy bonus.

The minibatch loss is, over N trajectories i with response tokens t,

    -(1/N) sum_i k_i sum_t [ S(p_it, A_i) - kl_coefficient * KL_it + entropy_coefficient * H_it ]

with A_i = (R_i - b_i) * scale_i (or what --vcpo-advantages gives), k_i set by the aggregation, and S = a * A_i * p_it
for weight corrections (the gradient is then the estimator of arXiv 2602.17616) or the clipped ratio times A_i for the
others. KL and entropy are terms of their own, never multiplied by the advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.objective.baseline import BaselineResult
from megatron_vcpo.objective.batch import LossBatch, prepare
from megatron_vcpo.objective.corrections import (
    CORRECTIONS,
    AppliedWeights,
    applied_weights,
    clip_surrogate,
    log_bounds,
    vetoed,
)
from megatron_vcpo.objective.kl import kl_estimate
from megatron_vcpo.objective.metrics import loss_metrics
from megatron_vcpo.objective.records import LossInputs, LossOutputs
from megatron_vcpo.objective.segments import spread
from megatron_vcpo.objective.trajectories import (
    energy_sums,
    length_normalizers,
    trajectory_baselines_with_fallbacks,
    trajectory_log_energies,
)


def vcpo_loss(inputs: LossInputs) -> LossOutputs:
    """The loss of one packed micro-batch.

    A trajectory with a non-finite reward or a non-finite masked-in log-prob (also of the reference, or entropy, where
    they enter the loss) is left out of the loss, the baselines and all metrics except `nonfinite_trajectories`. An
    empty response contributes nothing to the gradient. A weight of 0 (dropped by a mask correction or the veto) takes
    the trajectory out of the policy gradient, but N still counts it.

    Raises:
        ValueError: an input that the configuration needs is None.

    Source: arXiv 2602.17616.
    """
    config, batch = inputs.config, prepare(inputs)
    weights = applied_weights(batch.ratios, config)
    dropped = vetoed(batch.ratios, batch.ids, config)
    baselines = _baselines(inputs, batch, weights)
    if inputs.advantages is not None:
        advantages = inputs.advantages.detach().double()
    else:
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
        loss=loss, metrics=loss_metrics(inputs, batch, weights, dropped, baselines, advantages, kl, policy_loss)
    )


def _baselines(inputs: LossInputs, batch: LossBatch, weights: AppliedWeights) -> BaselineResult:
    config = inputs.config
    if inputs.baselines is not None:
        return BaselineResult(values=inputs.baselines.detach().double(), fallback=torch.zeros_like(batch.usable))
    log_e = None
    if config.baseline in ("opob", "opob-leave-one-out"):
        log_e = trajectory_log_energies(
            log_weights=batch.ratios.sequence,
            lengths=batch.lengths,
            energies=energy_sums(batch.ratios, weights, batch.ids, batch.mask, inputs.token_energies, config),
            config=config,
            num_trajectories=inputs.num_trajectories,
            num_tokens=inputs.num_tokens,
            max_response_length=inputs.max_response_length,
        )
    return trajectory_baselines_with_fallbacks(
        rewards=inputs.rewards, group_ids=inputs.group_ids, log_energies=log_e, config=config, usable=batch.usable
    )


def _surrogate(batch: LossBatch, weights: AppliedWeights, advantages: Tensor, config: VCPOConfig) -> Tensor:
    """Per-token objective [T], to be maximized."""
    correction, dtype = CORRECTIONS[config.correction], batch.policy.dtype
    token_advantages = spread(advantages, batch.ids).to(dtype)
    if correction.surrogate == "clip":
        log_ratio = batch.ratios.token if correction.level == "token" else spread(batch.ratios.mean, batch.ids)
        return clip_surrogate(batch.policy, log_ratio, token_advantages, *log_bounds(config))
    weight = weights.log_weights.exp()
    token_weights = weight if correction.level == "token" else spread(weight, batch.ids)
    return token_weights.to(dtype) * token_advantages * batch.policy
