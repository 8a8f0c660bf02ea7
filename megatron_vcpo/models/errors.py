"""What checkpoint/ raises, and how its sentences list names."""

from __future__ import annotations

from collections.abc import Iterable


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or that is not of the model at hand; one sentence names what to change."""


def some(names: Iterable[str]) -> str:
    """Names for a sentence: in order, and only the first of many."""
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
