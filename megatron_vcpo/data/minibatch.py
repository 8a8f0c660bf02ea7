"""Minibatch: what one optimizer step trains on. Refusal: a trajectory that is never trained on, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from megatron_vcpo.data.trajectory import Trajectory


class RefusalReason(Enum):
    """Why a trajectory is never trained on."""

    UNFIT = "unfit"
    """A part of it is missing or not finite."""
    STALE = "stale"
    """Its oldest sampled token is older than --rollout-max-lag allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One trajectory that was refused."""

    reason: RefusalReason
    sentence: str  # which trajectory, and what is wrong with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The trajectories of one optimizer step, the same in the same order on every rank."""

    trajectories: tuple[Trajectory, ...]
    lags: tuple[int, ...] = ()  # age of each trajectory, in optimizer steps; empty before it is taken
    refused: tuple[Refusal, ...] = ()  # trajectories dropped because they were too old when it was taken
    retries: int = 0  # earlier attempts to train on it, which failed

    @property
    def lag_max(self) -> float:
        """Age of the oldest trajectory, in optimizer steps."""
        return float(max(self.lags, default=0))

    @property
    def lag_mean(self) -> float:
        """Mean age of the trajectories, in optimizer steps."""
        return float(np.mean(self.lags)) if self.lags else 0.0
