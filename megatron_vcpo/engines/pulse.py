"""Signs of life from one process to another on the same machine: a counter in memory that both map.

It uses no locks or messages, so neither side can block the other. A process that is stopped, or in which no thread gets
to run, stops counting.
"""

from __future__ import annotations

import mmap
import os
import time

_BYTES = 8
_INTERVAL = 0.25  # seconds between two beats
_LONGEST_STEP = 2.0  # seconds of silence that one check can add


class Pulse:
    """The counter. One process increments it, the other reads it.

    Args:
        descriptor: of its file, inherited from the process that created it; None creates one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("megatron_vcpo pulse")
            os.ftruncate(descriptor, _BYTES)
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _BYTES)
        self._counter = memoryview(self._memory).cast("Q")

    def fileno(self) -> int:
        """The file descriptor, for `pass_fds` and as an argument in the other process."""
        return self._descriptor

    @property
    def beats(self) -> int:
        """The count so far."""
        return self._counter[0]

    def beat(self) -> None:
        """Count until the process ends; the target of a daemon thread."""
        while True:
            self._counter[0] += 1
            time.sleep(_INTERVAL)

    def close(self) -> None:
        """Free the memory; safe to call twice."""
        self._counter.release()
        if not self._memory.closed:
            self._memory.close()
            os.close(self._descriptor)


class Listener:
    """How long a pulse has been silent, for a process that checks about every second.

    Time during which the checking process itself was stopped does not count: Ctrl-Z stops both sides.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._beats = pulse.beats
        self._looked = time.monotonic()
        self._silence = 0.0

    def silence(self) -> float:
        """Seconds since the last beat."""
        now, beats = time.monotonic(), self._pulse.beats
        self._silence = 0.0 if beats != self._beats else self._silence + min(now - self._looked, _LONGEST_STEP)
        self._beats, self._looked = beats, now
        return self._silence
