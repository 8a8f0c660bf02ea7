"""A parameter scheduler whose learning rate for each step follows the effective sample size of that step."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.objective import learning_rate_multiplier

_EXPONENTS = {"off": 0.0, "sqrt": 0.5, "linear": 1.0}
_STATE_KEY = "ess"


@dataclass(frozen=True, slots=True, kw_only=True)
class EssSettings:
    """How rho becomes a multiplier: lr_eff = lr_schedule * clamp(rho / reference, floor, 1) ** exponent."""

    exponent: float = 0.5
    reference: float | None = 1.0  # None: the median rho over the first `reference_steps` steps at the lowest lag
    reference_steps: int = 16
    floor: float = 0.0

    @staticmethod
    def of(config: VCPOConfig) -> EssSettings:
        """The settings that the flags ask for."""
        return EssSettings(
            exponent=_EXPONENTS[config.ess_scaling],
            reference=None if config.ess_reference == "auto" else float(config.ess_reference),
            reference_steps=config.ess_reference_steps,
            floor=config.ess_floor,
        )


class EssParamScheduler(OptimizerParamScheduler):
    """Megatron-Core's scheduler with a multiplier that lasts for one optimizer step.

    `apply(rho)` sets the learning rate of the coming step; `step(increment)` and `restore()` end it. The base schedule
    never sees the multiplier: each step's learning rate is computed from the schedule anew, so a skipped step leaves no
    trace. The automatic reference is part of the state; it is the same on every rank because rho is.
    """

    def __init__(self, *args: Any, ess: EssSettings | None = None, **kwargs: Any) -> None:
        """Args: those of OptimizerParamScheduler, and `ess`, the settings (defaults: sqrt, reference 1.0)."""
        self.ess = ess or EssSettings()
        self.multiplier = 1.0
        self._observed: list[float] = []  # rho at the lowest lag seen so far, until the reference is settled
        self._observed_lag = math.inf
        self._pending: tuple[float, float] | None = None
        super().__init__(*args, **kwargs)

    @property
    def reference(self) -> float:
        """rho at or above which the learning rate is the schedule's own; NaN before anything was observed."""
        if self.ess.reference is not None:
            return self.ess.reference
        return statistics.median(self._observed) if self._observed else math.nan

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """The schedule's learning rate times the multiplier of the current step."""
        return float(super().get_lr(param_group)) * self.multiplier

    def apply(self, rho: float, lag: float = 0.0) -> float:
        """Set the learning rate of the coming optimizer step.

        Args:
            rho: effective sample size of the minibatch over its size, in [0, 1]; anything non-finite means the floor.
            lag: age of the minibatch in optimizer steps; only the automatic reference looks at it.

        Returns:
            The multiplier.
        """
        self._pending = (rho, lag)
        reference = self.reference
        if math.isnan(reference):
            reference = rho if 0.0 < rho <= 1.0 else 1.0
        if self.ess.exponent == 0.0:
            self.multiplier = 1.0
        else:
            self.multiplier = learning_rate_multiplier(rho, reference, self.ess.exponent, self.ess.floor)
        super().step(0)
        return self.multiplier

    def restore(self) -> None:
        """Go back to the schedule's own learning rate after a skipped step."""
        self._pending = None
        self.multiplier = 1.0
        super().step(0)

    def step(self, increment: int) -> None:
        """Advance the base schedule after an optimizer step and drop the multiplier."""
        if self._pending is not None and increment > 0:
            self._observe(*self._pending)
        self._pending = None
        self.multiplier = 1.0
        super().step(increment)

    def _observe(self, rho: float, lag: float) -> None:
        if self.ess.reference is not None or len(self._observed) >= self.ess.reference_steps or not 0.0 < rho <= 1.0:
            return
        if lag < self._observed_lag:
            self._observed, self._observed_lag = [], lag
        if lag == self._observed_lag:
            self._observed.append(rho)

    def state_dict(self) -> dict[str, Any]:
        """Megatron-Core's state, and the state of the automatic reference."""
        return {**super().state_dict(), _STATE_KEY: {"observed": list(self._observed), "lag": self._observed_lag}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this scheduler's state or Megatron-Core's; after the latter the automatic reference starts anew."""
        super().load_state_dict(self._without_idle_lengths(state_dict))
        ess = state_dict.get(_STATE_KEY, {})
        self._observed = [float(rho) for rho in ess.get("observed", [])]
        self._observed_lag = float(ess.get("lag", math.inf))

    def _without_idle_lengths(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        # Megatron derives both lengths from --train-iters and refuses a checkpoint that has others; for a constant
        # schedule they mean nothing, and a longer run may resume.
        state = dict(state_dict)
        if self.wd_incr_style == "constant" == state.get("wd_incr_style"):
            state["wd_incr_steps"] = self.wd_incr_steps
        if self.lr_decay_style == "constant" == state.get("lr_decay_style"):
            state["lr_decay_steps"] = self.lr_decay_steps
        return state
