"""TrajectoryFeed: the data iterator that Megatron's loop sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_vcpo.mcore.packing import MicroBatch


class TrajectoryFeed:
    """One for each model chunk: it hands out what the step has packed.

    Args:
        state: what a resumed run continues from, or None where another rank saves it.
    """

    def __init__(self, state: Callable[[], dict[str, Any] | None]) -> None:
        self._state = state
        self._micro_batches: Iterator[MicroBatch] = iter(())

    def fill(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Take the micro-batches of one pass."""
        self._micro_batches = micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        return next(self._micro_batches)

    def save_state(self) -> dict[str, Any] | None:
        """The state; Megatron writes it beside the checkpoint of the same iteration."""
        return self._state()
