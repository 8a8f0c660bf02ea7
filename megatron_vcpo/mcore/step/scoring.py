"""What a forward-only pass says of a micro-batch's trajectories."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.packing import MicroBatch
from megatron_vcpo.objective import segment_ids, segment_sum, sequence_log_weights, trajectory_energies


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
