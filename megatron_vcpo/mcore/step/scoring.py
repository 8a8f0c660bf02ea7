"""What a pass tells about trajectories: log-weights, energies, whether they can be trained on, and baselines."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.energies.exact import Measured
from megatron_vcpo.mcore.packed_minibatch import PackedMinibatch
from megatron_vcpo.mcore.packing import MicroBatch
from megatron_vcpo.objective import (
    BaselineResult,
    segment_ids,
    segment_sum,
    sequence_log_weights,
    trajectory_baselines_with_fallbacks,
    trajectory_energies,
    trajectory_log_energies,
    usable_trajectories,
)


def log_weights(micro: MicroBatch, logprobs: Tensor) -> Tensor:
    """Log importance weights of a micro-batch's trajectories: [n] fp64.

    Args:
        micro: holds the behaviour log-probs.
        logprobs: the policy's, [T].
    """
    return sequence_log_weights(logprobs.detach(), micro.behavior_logprobs, micro.response_mask, micro.trajectory_ends)


def baseline_columns(micro: MicroBatch, stats: dict[str, Tensor], config: VCPOConfig) -> Tensor:
    """Log-weights, energies and lengths of a micro-batch's trajectories: [3, n] fp64."""
    energies = trajectory_energies(
        policy_logprobs=stats["logprobs"],
        behavior_logprobs=micro.behavior_logprobs,
        mask=micro.response_mask,
        cu_seqlens=micro.trajectory_ends,
        token_energies=stats["energy"],
        config=config,
    )
    return torch.stack([log_weights(micro, stats["logprobs"]), energies, _lengths(micro)])


def _lengths(micro: MicroBatch) -> Tensor:
    """Sampled tokens of a micro-batch's trajectories: [n] fp64."""
    ids = segment_ids(micro.trajectory_ends, micro.num_rows)
    return segment_sum(micro.response_mask.double(), ids, micro.num_trajectories)


def usable_of(micro: MicroBatch, stats: dict[str, Tensor], rewards: Tensor, config: VCPOConfig) -> Tensor:
    """Which of a micro-batch's trajectories can be trained on: [n] bool.

    Args:
        micro: the micro-batch, with the reference's log-probs if there is a KL penalty.
        stats: token statistics under the policy.
        rewards: of the whole minibatch, [N].
        config: the objective.
    """
    return usable_trajectories(
        policy_logprobs=stats["logprobs"],
        behavior_logprobs=micro.behavior_logprobs,
        mask=micro.response_mask,
        cu_seqlens=micro.trajectory_ends,
        rewards=rewards[torch.tensor(micro.indices, dtype=torch.int64, device=rewards.device)],
        config=config,
        reference_logprobs=micro.reference_logprobs,
        entropy=stats["entropy"],
    )


def minibatch_baselines(
    batch: PackedMinibatch, measured: Measured, config: VCPOConfig, max_response_length: int
) -> BaselineResult:
    """Optimal baselines [N] of a whole minibatch, from what a pass over it measured."""
    log_energies = trajectory_log_energies(
        log_weights=measured.log_weights,
        lengths=measured.lengths,
        energies=measured.energies,
        config=config,
        num_trajectories=float(batch.num_trajectories),
        num_tokens=float(batch.num_response_tokens),
        max_response_length=max_response_length,
    )
    return trajectory_baselines_with_fallbacks(
        rewards=batch.rewards,
        group_ids=batch.group_ids,
        log_energies=log_energies,
        config=config,
        usable=torch.isfinite(measured.log_weights),
    )
