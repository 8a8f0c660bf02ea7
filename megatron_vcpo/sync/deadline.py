"""Deadline: a wait that lasts too long raises an error that says what was waited for."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from megatron_vcpo.sync.errors import SyncError


class Deadline:
    """Raises SyncError in the main thread once `seconds` have passed since the last `waiting_for`.

    Uses SIGALRM, which interrupts Python code and system calls. It does not interrupt a collective inside a C++
    library; the timeout of the process group (--distributed-timeout-minutes) ends that. Outside the main thread there
    is no alarm.
    """

    def __init__(self, seconds: float, flag: str) -> None:
        self._seconds = seconds
        self._flag = flag
        self._what = "the start"
        self._armed = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Set the alarm within this block, then restore the previous handler and timer."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, self._ring)
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        self._armed = True
        try:
            self._set()
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, left, interval)
            signal.signal(signal.SIGALRM, before)

    def waiting_for(self, what: str) -> None:
        """Restart the time, now waiting for `what`."""
        self._what = what
        if self._armed:
            self._set()

    def _set(self) -> None:
        # repeats, because the code that handles the error may get stuck too
        signal.setitimer(signal.ITIMER_REAL, self._seconds, self._seconds)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        raise SyncError(f"waited {self._seconds:g} seconds ({self._flag}) for {self._what}")
