"""Staleness: the one place where --rollout-max-lag is read."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vcpo.config.checks import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How old tokens become, and how old they may be. Ages are in optimizer steps.

    The age of a trajectory is that of its oldest sampled token.
    """

    max_lag: int
    """Largest age that is trained on."""

    steps_per_phase: int
    """Optimizer steps that one rollout phase feeds."""

    sync_interval: int
    """Optimizer steps between two publications of weights."""

    @property
    def oldest(self) -> int:
        """Age that the oldest token reaches where engines and trainer take turns."""
        phase, interval = self.steps_per_phase, self.sync_interval
        return (interval - 1) // phase * phase + phase - 1 if interval > 1 else phase - 1

    def require_attainable(self) -> None:
        """ConfigError where trajectories would be refused by plan."""
        if self.oldest > self.max_lag:
            raise ConfigError(
                f"--sync-interval {self.sync_interval} with {self.steps_per_phase} step(s) per rollout phase trains on "
                f"tokens up to {self.oldest} steps old, but --rollout-max-lag is {self.max_lag} and they would all be "
                "refused; raise --rollout-max-lag or lower one of the two."
            )
