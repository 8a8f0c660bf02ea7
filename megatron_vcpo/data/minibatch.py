"""Minibatch: what one optimizer step trains on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_vcpo.data.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The trajectories of one optimizer step, the same in the same order on every rank."""

    trajectories: tuple[Trajectory, ...]
    lags: tuple[int, ...] = ()  # age of each trajectory, in optimizer steps; empty before it is taken
    refused_stale: int = 0  # trajectories that were too old when it was taken, and are gone
    retries: int = 0  # how often it was trained on before, without success

    @property
    def lag_max(self) -> float:
        """Age of the oldest trajectory."""
        return float(max(self.lags, default=0))

    @property
    def lag_mean(self) -> float:
        """Mean age of the trajectories."""
        return float(np.mean(self.lags)) if self.lags else 0.0
