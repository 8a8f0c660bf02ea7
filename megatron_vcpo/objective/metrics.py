"""What `vcpo_loss` measures besides its value."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vcpo.objective.baseline import BaselineResult
from megatron_vcpo.objective.batch import LossBatch
from megatron_vcpo.objective.corrections import CORRECTIONS, AppliedWeights
from megatron_vcpo.objective.kl import kl_estimate
from megatron_vcpo.objective.records import LossInputs
from megatron_vcpo.objective.segments import spread


def loss_metrics(
    inputs: LossInputs,
    batch: LossBatch,
    weights: AppliedWeights,
    dropped: Tensor,
    baselines: BaselineResult,
    advantages: Tensor,
    kl: Tensor | None,
    policy_loss: Tensor,
) -> dict[str, Tensor]:
    """Every metric of the micro-batch by name, as [2] = (sum, count) in fp64."""

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
        # Means over all trajectories, so that multiplying by N gives counts.
        "vetoed": over(dropped & batch.usable, everything),
        "baseline_fallbacks": over(baselines.fallback & batch.usable, everything),
        "response_length": over(batch.lengths, batch.usable),
    }
