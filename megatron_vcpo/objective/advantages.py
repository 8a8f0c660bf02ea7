"""Advantages of a user's own, in place of (reward - baseline) * scale.

They are computed once for each minibatch, identically on every rank, before any forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.objective.import_path import load_function


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """A whole minibatch: N trajectories of all data-parallel ranks, in the same order on every rank.

    Example:
        >>> AdvantageInputs(rewards=torch.tensor([1.0, 0.0]).double(), group_ids=torch.tensor([7, 7]),
        ...                 lengths=torch.tensor([3, 5]), config=VCPOConfig())
    """

    rewards: Tensor  # [N] fp64, all finite
    group_ids: Tensor  # [N] int64, any values
    lengths: Tensor  # [N] int64 sampled tokens
    config: VCPOConfig


Advantages = Callable[[AdvantageInputs], Tensor]
"""Returns [N], finite; a function of its inputs alone, so that every rank gets the same."""


def load_advantages(path: str | None) -> Advantages | None:
    """The function that --vcpo-advantages names. Raises ConfigError if it does not exist; None without the flag."""
    return None if path is None else load_function(path, "--vcpo-advantages")


def checked_advantages(function: Advantages, inputs: AdvantageInputs) -> Tensor:
    """The advantages of a minibatch: [N] fp64.

    Raises:
        ConfigError: the function returned anything but one finite number for each trajectory.
    """
    values = function(inputs)
    flag = f"--vcpo-advantages {inputs.config.advantages}"
    if not isinstance(values, Tensor) or values.shape != inputs.rewards.shape:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(f"{flag} must return a tensor of shape {tuple(inputs.rewards.shape)}, not {found}.")
    if values.is_complex() or values.layout != torch.strided:
        raise ConfigError(f"{flag} must return real numbers in a plain tensor, not {values.dtype} in {values.layout}.")
    values = values.detach().to(inputs.rewards.device, torch.float64)
    bad = ~(values.abs() <= torch.finfo(torch.float32).max)  # NaN too; the loss computes in fp32
    if bool(bad.any()):
        place = int(bad.nonzero()[0])
        raise ConfigError(
            f"{flag} returned {float(values[place])} for trajectory {place} of {len(values)}, whose reward is "
            f"{float(inputs.rewards[place])}: an advantage must be finite, in fp32 too."
        )
    return values
