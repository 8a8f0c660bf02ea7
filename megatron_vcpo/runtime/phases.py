"""Where this process stands: one record that the loop writes and the watchdog reads.

Phases are entered at points that every rank passes in the same order, so that their running number says who is behind.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What a process is doing."""

    name: str
    number: int  # how many phases this process has entered
    iteration: int  # 1-based; 0 before the first
    alone: bool  # a rank can end it without the others
    since: float  # time.monotonic() at its start


entered = threading.Event()
"""Set by each `enter`, for the one who waits for it to clear."""

_current = Phase(name="start", number=0, iteration=0, alone=False, since=time.monotonic())


def enter(name: str, *, alone: bool = False, iteration: int | None = None) -> None:
    """Begin a phase; costs microseconds.

    Args:
        name: for a person.
        alone: nothing in it waits for other ranks.
        iteration: the number of the iteration that begins with it; None stays in the one before.
    """
    global _current
    _current = Phase(
        name=name,
        number=_current.number + 1,
        iteration=_current.iteration if iteration is None else iteration,
        alone=alone,
        since=time.monotonic(),
    )
    entered.set()
    logger.debug("phase %d of iteration %d: %s", _current.number, _current.iteration, name)


def current() -> Phase:
    """The phase this process is in."""
    return _current
