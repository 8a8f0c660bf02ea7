"""Signs of life between two processes of a machine: a counter in memory that both map.

No lock and no message, so that neither side can hold the other up; a stopped process, or one in which no thread gets to
run, stops counting.
"""

from __future__ import annotations

import mmap
import os
import time

_BYTES = 8
_INTERVAL = 0.25  # seconds between two beats
_LONGEST_STEP = 2.0  # seconds of silence that one look can add


class Pulse:
    """The counter. One process beats, the other looks.

    Args:
        descriptor: of the file behind it, inherited from the process that made it; None makes one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("megatron_vcpo pulse")
            os.ftruncate(descriptor, _BYTES)
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _BYTES)
        self._counter = memoryview(self._memory).cast("Q")

    def fileno(self) -> int:
        """For `pass_fds`, and the argument in the other process."""
        return self._descriptor

    @property
    def beats(self) -> int:
        """So far."""
        return self._counter[0]

    def beat(self) -> None:
        """Count for ever; the target of a daemon thread."""
        while True:
            self._counter[0] += 1
            time.sleep(_INTERVAL)

    def close(self) -> None:
        """Let the memory go; safe to call twice."""
        self._counter.release()
        if not self._memory.closed:
            self._memory.close()
            os.close(self._descriptor)


class Listener:
    """How long a pulse has been silent, as a process sees it that looks every second or so.

    What the looker itself slept through does not count: after Ctrl-Z and fg both sides have been still.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._beats = pulse.beats
        self._looked = time.monotonic()
        self._silence = 0.0

    def silence(self) -> float:
        """Seconds without a beat so far."""
        now, beats = time.monotonic(), self._pulse.beats
        self._silence = 0.0 if beats != self._beats else self._silence + min(now - self._looked, _LONGEST_STEP)
        self._beats, self._looked = beats, now
        return self._silence
