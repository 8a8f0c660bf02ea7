"""StepOutcome: what became of one optimizer step. Loops decide by it, and the log is derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """Whether the parameters changed, and if not, why."""

    TRAINED = "trained"
    OVERFLOW = "overflow"
    """FP16's loss scaler met a gradient that is not finite and lowers its scale; the minibatch may be tried again."""
    SKIPPED = "skipped"
    """The step was not fit to be made; trying it again would change nothing."""
    REPEAT = "repeat"
    """Trajectories are not finite under the policy: give the same minibatch again, and they are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The same on every rank."""

    verdict: Verdict
    metrics: Mapping[str, float]
    reason: str = ""  # of a step that was skipped
    excluded: frozenset[int] = frozenset()  # places in the minibatch of trajectories that took no part

    @property
    def trained(self) -> bool:
        """Whether the parameters changed."""
        return self.verdict is Verdict.TRAINED
