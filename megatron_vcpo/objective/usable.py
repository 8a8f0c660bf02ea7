"""Which trajectories can be trained on: the one definition that every denominator, baseline and metric uses."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.objective.segments import segment_ids, segment_sum


def finite_trajectories(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Whether every masked-in token of a trajectory has a finite value.

    Args:
        values: [T].
        mask: [T] bool; values at False positions are ignored.
        cu_seqlens: [n + 1] int.

    Returns:
        [n] bool; True for an empty response.
    """
    ids = segment_ids(cu_seqlens, mask.numel())
    bad = (mask.bool() & ~torch.isfinite(values.detach())).double()
    return segment_sum(bad, ids, cu_seqlens.numel() - 1) == 0.0


def usable_trajectories(
    *,
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    rewards: Tensor,
    config: VCPOConfig,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Tensor:
    """Whether everything that a trajectory contributes to the loss is finite: its reward and, on every masked-in token,
    both log-probs, the reference's log-prob if there is a KL penalty, and the entropy if there is a bonus for it.

    Args:
        policy_logprobs: [T].
        behavior_logprobs: [T].
        mask: [T] bool.
        cu_seqlens: [n + 1] int.
        rewards: [n].
        config: its coefficients say what enters the loss.
        reference_logprobs: [T].
        entropy: [T].

    Returns:
        [n] bool.
    """
    columns = [policy_logprobs, behavior_logprobs]
    # A quantity that is only measured, and does not enter the loss, must not exclude a trajectory.
    if config.kl_coefficient > 0.0 and reference_logprobs is not None:
        columns.append(reference_logprobs)
    if config.entropy_coefficient != 0.0 and entropy is not None:
        columns.append(entropy)
    usable = torch.isfinite(rewards)
    for values in columns:
        usable = usable & finite_trajectories(values, mask, cu_seqlens)
    return usable
