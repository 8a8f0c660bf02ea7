"""The trainer's side of one reward process: a keeper and its worker, two sockets, and a deadline.

Nothing here waits, except `close`: sockets do not block, and a process is only asked to end.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from megatron_vcpo.rollout.rewards.keeper import REPORT
from megatron_vcpo.rollout.rewards.worker import LENGTH, NUMBER

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megatron_vcpo.rollout.rewards.keeper import main; main()"
)
_LARGEST_ANSWER = 1 << 20  # bytes of one message from a worker; a longer one cannot come from our code
_CHUNK = 1 << 16  # bytes per read


class StrayMessage(Exception):
    """A message was not sent by the worker's own code: a reward has written to its socket."""


class RewardProcess:
    """A process that is building its environment, idle, or judging one reward.

    Args:
        setup: the pickled arguments of `make_environment`.
        selector: watches the sockets; the data of their keys is this object.
        deadline: of the environment's constructor, in time.monotonic().

    Raises OSError if no process can be started.
    """

    def __init__(self, setup: bytes, selector: selectors.BaseSelector, deadline: float) -> None:
        self.ready = False  # the environment has been built
        self.task: int | None = None  # index of its current reward
        self.taken = False  # the worker has begun with it
        self.number = 0  # running number of the task
        self.deadline = deadline  # of the constructor or the task; infinity when idle
        self.gone = False  # the worker or its keeper has ended
        self.exit_code: int | None = None
        self._worker: int | None = None  # process id, once the keeper has sent it
        self._selector = selector
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()
        self._reports = bytearray()
        self._control, control = socket.socketpair()
        self._work, work = socket.socketpair()
        with control, work:
            try:
                self._keeper = _start(control, work)
            except OSError:
                self._control.close()
                self._work.close()
                raise
        for end in (self._control, self._work):
            end.setblocking(False)
            selector.register(end, selectors.EVENT_READ, self)
        self._send(setup)

    def give(self, task: int, number: int, pair: bytes, deadline: float) -> None:
        """Have an idle process judge a pickled (prompt, response) pair."""
        self.task, self.number, self.taken, self.deadline = task, number, False, deadline
        self._send(NUMBER.pack(number) + pair)

    def rest(self) -> None:
        """Mark the process as idle."""
        self.task, self.taken, self.deadline = None, False, float("inf")

    def messages(self) -> Iterator[dict[str, Any]]:
        """Send and receive what is possible without waiting, and yield the messages received.

        Raises StrayMessage.
        """
        self._flush()
        self._read_work()
        self._read_control()
        while len(self._incoming) >= LENGTH.size:
            size = LENGTH.unpack_from(self._incoming)[0]
            if size > _LARGEST_ANSWER:
                raise StrayMessage
            end = LENGTH.size + size
            if len(self._incoming) < end:
                return
            try:
                message = json.loads(self._incoming[LENGTH.size : end])
            except (ValueError, RecursionError):
                raise StrayMessage from None
            if not isinstance(message, dict):
                raise StrayMessage
            del self._incoming[:end]
            yield message

    @property
    def end_in_words(self) -> str:
        """How the process ended, in words."""
        if self.exit_code is None:
            return "it was killed from outside"
        return f"it ended with exit code {self.exit_code}"

    def end(self) -> None:
        """Ask the keeper to end the worker and everything it started."""
        for key in [key for key in self._selector.get_map().values() if key.data is self]:
            self._selector.unregister(key.fileobj)
        self._work.close()
        self._ask_to_end()

    def ended(self) -> bool:
        """Whether nothing is left of the process, after `end`."""
        if self._keeper.poll() is None:
            return False
        self._read_control()
        if self._keeper.returncode != 0 and self._worker is not None:
            # The keeper was killed rather than ended. The kernel has killed the worker with it; this kills the worker's
            # group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._worker, signal.SIGKILL)
        self._control.close()
        return True

    def close(self, until: float) -> None:
        """Call after `end`: wait for the process, and kill the keeper at time.monotonic() `until`."""
        try:
            self._keeper.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self.ended()

    # -- sockets ---------------------------------------------------------------------------------------------------

    def _send(self, message: bytes) -> None:
        self._outgoing = memoryview(LENGTH.pack(len(message)) + message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._work.send(self._outgoing, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing = memoryview(b"")  # the worker has ended; the keeper will report it
        key = self._selector.get_map().get(self._work)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if key is not None and key.events != events:
            self._selector.modify(self._work, events, self)

    def _read_work(self) -> None:
        data = _read(self._work)
        if data:
            self._incoming += data
        elif data is not None and self._work in self._selector.get_map():
            # The worker has ended, or a reward closed its socket: the keeper will end it and report.
            self._selector.unregister(self._work)
            self._ask_to_end()

    def _read_control(self) -> None:
        while data := _read(self._control):
            self._reports += data
        whole = len(self._reports) // REPORT.size * REPORT.size
        numbers = [number for (number,) in REPORT.iter_unpack(self._reports[:whole])]
        self._worker = numbers[0] if numbers else None
        self.exit_code = numbers[1] if len(numbers) > 1 else None
        self.gone = self.gone or data is not None or self.exit_code is not None

    def _ask_to_end(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)  # takes effect even if a fork of the trainer still holds the socket
        self._keeper.send_signal(signal.SIGCONT)  # in case a reward has stopped it


def _start(control: socket.socket, work: socket.socket) -> subprocess.Popen[bytes]:
    """Start a keeper. Not by multiprocessing, whose children import the main module and are ended by a signal to only
    one process."""
    descriptors = (control.fileno(), work.fileno())
    options = [f"-W{option}" for option in sys.warnoptions]
    paths = json.dumps([str(path) for path in sys.path])
    numbers = [str(number) for number in (*descriptors, os.getpid())]
    command = [sys.executable, *options, "-c", _PROGRAM, paths, *numbers]
    return subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, start_new_session=True)


def _read(end: socket.socket) -> bytes | None:
    """The bytes available; empty at the end of the stream, None if there are none yet."""
    try:
        return end.recv(_CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
