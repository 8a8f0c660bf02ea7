"""Sequence log-weights: how much likelier a response is under the policy than under the distribution that sampled
it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vcpo.objective.segments import segment_ids, segment_sum


def masked_log_ratio(policy_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Token log-ratio policy - behaviour in fp64; 0 where the mask is False, whatever the log-probs there."""
    difference = policy_logprobs.double() - behavior_logprobs.double()
    # where, not a product: 0 * NaN is NaN.
    return torch.where(mask.bool(), difference, 0.0)


def sequence_log_weights(
    policy_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """lam = sum over masked-in tokens of (policy - behaviour) log-prob, for each trajectory.

    Args:
        policy_logprobs: [N, T] padded, or [T] packed together with cu_seqlens; nats.
        behavior_logprobs: the same shape.
        mask: the same shape, bool; log-probs at False positions are ignored.
        cu_seqlens: [N + 1] int for packed input.

    Returns:
        [N] fp64, 0 for an empty response; not finite where a masked-in log-prob is not. Differentiable.

    Raises:
        ValueError: shapes that do not fit together.

    Source: arXiv 2602.17616.
    """
    if not policy_logprobs.shape == behavior_logprobs.shape == mask.shape:
        raise ValueError(
            f"sequence_log_weights: policy {tuple(policy_logprobs.shape)}, behaviour {tuple(behavior_logprobs.shape)} "
            f"and mask {tuple(mask.shape)} must have one shape."
        )
    if policy_logprobs.dim() != (2 if cu_seqlens is None else 1):
        raise ValueError("sequence_log_weights: give [N, T], or [T] together with cu_seqlens.")
    log_ratio = masked_log_ratio(policy_logprobs, behavior_logprobs, mask)
    if cu_seqlens is None:
        return log_ratio.sum(-1)
    return segment_sum(log_ratio, segment_ids(cu_seqlens, log_ratio.numel()), cu_seqlens.numel() - 1)
