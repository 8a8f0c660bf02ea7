"""TrajectoryFeed: the data iterator for Megatron's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_vcpo.mcore.packing import MicroBatch


class TrajectoryFeed:
    """Hands out the micro-batches that the step has packed; one feed for each model chunk.

    Args:
        state: returns the state for a resumed run, or None if another rank saves it.
    """

    def __init__(self, state: Callable[[], dict[str, Any] | None]) -> None:
        self._state = state
        self._micro_batches: Iterator[MicroBatch] = iter(())

    def fill(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Set the micro-batches of one pass."""
        self._micro_batches = micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        return next(self._micro_batches)

    def save_state(self) -> dict[str, Any] | None:
        """The state, which Megatron writes beside the checkpoint of the same iteration."""
        return self._state()
