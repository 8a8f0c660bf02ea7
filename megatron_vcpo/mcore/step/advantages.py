"""A user's own advantages (--vcpo-advantages) for one minibatch, checked to be the same on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.reductions import RankDisagreement, agree
from megatron_vcpo.objective import AdvantageInputs, Advantages, checked_advantages
from megatron_vcpo.runtime.agreement import raise_together


def minibatch_advantages(
    function: Advantages, trajectories: Sequence[Trajectory], config: VCPOConfig, device: torch.device
) -> Tensor:
    """Call the function with a whole minibatch: [N] fp64. Collective over all ranks; not called for an empty minibatch.

    Raises:
        ConfigError: on every rank; the function raised on one of them, returned anything but one finite number for each
            trajectory, or different numbers on different ranks, whose parameters would then drift apart.
    """
    if not trajectories:
        return torch.zeros(0, dtype=torch.float64, device=device)
    inputs = AdvantageInputs(
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float64, device=device),
        group_ids=torch.tensor([t.group_id for t in trajectories], dtype=torch.int64, device=device),
        lengths=torch.tensor([int(np.count_nonzero(t.response_mask)) for t in trajectories], device=device),
        config=config,
    )
    values, failure = torch.zeros(0), None
    try:
        values = checked_advantages(function, inputs)
    except ConfigError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - raised below, on all ranks together
        failure = ConfigError(f"--vcpo-advantages {config.advantages} raised {type(error).__name__}: {error}")
        failure.__cause__ = error
    raise_together(failure)
    checksum = zlib.crc32(values.cpu().numpy().tobytes())
    try:
        agree(float(checksum), False, what="The checksum of the advantages", device=device)
    except RankDisagreement as error:
        raise ConfigError(
            f"--vcpo-advantages {config.advantages} returned different numbers on different ranks: it must depend on "
            "its inputs alone, not on random numbers, time or the order of a set."
        ) from error
    return values
