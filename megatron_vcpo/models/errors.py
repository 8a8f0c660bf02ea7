"""The error for checkpoints, and how its messages list names."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or is of a different model; the message, one sentence, says what to change."""


def some(names: Iterable[str]) -> str:
    """Names for a message: sorted, and only the first few of many."""
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
