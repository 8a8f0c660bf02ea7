"""LossBatch: a micro-batch with everything unusable masked out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vcpo.objective.corrections import LogRatios, log_ratios
from megatron_vcpo.objective.records import LossInputs
from megatron_vcpo.objective.segments import segment_ids, segment_sum, spread
from megatron_vcpo.objective.usable import usable_trajectories


@dataclass(frozen=True, kw_only=True, slots=True)
class LossBatch:
    """A micro-batch with everything unusable masked out."""

    ids: Tensor  # [T] trajectory that owns each position, n where none does
    mask: Tensor  # [T] bool, True on masked-in tokens of usable trajectories
    policy: Tensor  # [T] with gradient, 0 where mask is False
    usable: Tensor  # [n] bool
    lengths: Tensor  # [n] fp64, 0 where not usable
    ratios: LogRatios  # 0 where mask is False
    reference: Tensor | None  # [T], arbitrary where mask is False
    entropy: Tensor | None  # [T] with gradient, arbitrary where mask is False


def prepare(inputs: LossInputs) -> LossBatch:
    """Mask out what is not usable. Raises ValueError if an input that the configuration needs is None."""
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

    # torch.where here on the input, and in aggregate() on the output, keeps a masked-out NaN out of the loss and (0 *
    # NaN) out of its gradient.
    policy = torch.where(mask, inputs.policy_logprobs, 0.0)
    return LossBatch(
        ids=ids,
        mask=mask,
        policy=policy.float() if policy.dtype in (torch.float16, torch.bfloat16) else policy,
        usable=usable,
        lengths=segment_sum(mask.double(), ids, n),
        ratios=log_ratios(inputs.policy_logprobs, inputs.behavior_logprobs, mask, inputs.cu_seqlens),
        reference=inputs.reference_logprobs,
        entropy=inputs.entropy,
    )
