"""StepOutcome: the result of one optimizer step. Loops act on it, and the log is derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """Whether the parameters changed, and if not, why not."""

    TRAINED = "trained"
    OVERFLOW = "overflow"
    """FP16's loss scaler found a gradient that is not finite and lowered its scale; the minibatch may be tried
    again."""
    SKIPPED = "skipped"
    """The step was unsound; trying it again would not help."""
    REPEAT = "repeat"
    """Some trajectories are not finite under the policy; pass the same minibatch again and they are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of one step, the same on every rank."""

    verdict: Verdict
    metrics: Mapping[str, float]
    reason: str = ""  # why the step was skipped
    excluded: frozenset[int] = frozenset()  # places in the minibatch of trajectories that took no part

    @property
    def trained(self) -> bool:
        """Whether the parameters changed."""
        return self.verdict is Verdict.TRAINED
