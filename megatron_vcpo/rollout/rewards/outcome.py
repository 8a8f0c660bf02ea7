"""The outcome of one reward, and the check of its value. Light to import, because every reward process imports it."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("raised", "timeout", "died", "invalid")
"""How a reward can fail: an exception, its deadline, the end of its process, a result that is not a finite number."""

LARGEST_REWARD = 3.4e38
"""Rewards are trained on in fp32, where a larger one would be infinite."""

MOST_PARTS = 64
"""Most named parts of one reward; each becomes a metric of its own in every log."""

LONGEST_NAME = 128
"""Most characters of a part's name."""

_SAID = 500  # characters of an error that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """The outcome of one reward: a finite number, or None and the reason in one sentence."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    kind: str | None = None  # kind of the error, one of KINDS


def rejected(kind: str, error: str) -> RewardOutcome:
    """The outcome of a reward that failed, with its error made safe to write to a file."""
    said = error[:_SAID].encode("utf-8", "backslashreplace").decode("utf-8")
    return RewardOutcome(reward=None, kind=kind, error=said)


def checked(result: Any) -> RewardOutcome:
    """Check what an environment's `reward` returned: a finite number, or a mapping of names to such numbers with
    'reward'."""
    if not isinstance(result, Mapping):
        result = {"reward": result}
    if len(result) > MOST_PARTS + 1:
        return rejected("invalid", f"the reward gave {len(result) - 1} parts, more than {MOST_PARTS}")
    if "reward" not in result:
        return rejected("invalid", f"the reward gave {sorted(map(str, result))} without 'reward'")
    values: dict[str, float] = {}
    for key, value in result.items():
        name = str(key)
        if len(name) > LONGEST_NAME:
            return rejected(
                "invalid", f"the reward gave a part with a name of {len(name)} characters, more than {LONGEST_NAME}"
            )
        if not _encodable(name):
            return rejected("invalid", f"the reward gave a part named {name!a}, which is not valid Unicode text")
        number = value.item() if hasattr(value, "item") else value  # numpy scalars, booleans included
        if not isinstance(number, numbers.Real) or not abs(float(number)) <= LARGEST_REWARD:  # NaN fails too
            return rejected("invalid", f"the reward gave {name}={value!r}"[:200] + ", not a finite number")
        values[name] = float(number)
    return RewardOutcome(reward=values.pop("reward"), parts=values)


def _encodable(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
