"""The process between the trainer and one reward worker: whichever of them ends, it cleans up after the worker.

    trainer --> keeper --> worker --> whatever the reward starts

A reward may hold the GIL, ignore signals, be stopped, or start processes, even ones that leave its process group. The
keeper runs none of that code. It kills the worker and all of its descendants when the trainer asks, when the trainer is
gone for whatever reason, and when the worker has ended. The kernel helps:

* the worker asks to be killed with the keeper (PR_SET_PDEATHSIG is tied to the parent's thread; a keeper has only one);
* descendants whose parent ends become the keeper's children (PR_SET_CHILD_SUBREAPER), so it finds them all;
* a stopped keeper continues when the trainer's thread that started it ends.

The keeper cannot kill processes of another user (sudo in a reward) or processes in an uninterruptible system call. If a
reward kills its keeper, the trainer kills only the reward's process group; other processes of the reward remain.

This module imports only the standard library: the worker is a fork of this process, which must be small and have one
thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterator

REPORT = struct.Struct("<i")
"""The keeper's messages to the trainer on the control socket: the worker's process id, then its exit code."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GLANCE = 1.0  # seconds between checks whether the trainer is alive
_GIVING_UP = 8.0  # seconds after which descendants that do not die are abandoned
_PAUSE = 0.02  # seconds between rounds of killing


def main() -> None:
    """Run by `RewardProcess`, in a session of its own.

    Arguments: sys.path (for the code that starts this), the descriptors of control and work socket, the trainer's
    process id.
    """
    control, work, owner = (int(argument) for argument in sys.argv[2:])
    _Keeper(socket.socket(fileno=control), socket.socket(fileno=work), owner).run()


class _Keeper:
    def __init__(self, control: socket.socket, work: socket.socket, owner: int) -> None:
        self._control = control
        self._work = work
        self._owner = owner
        self._libc = ctypes.CDLL(None)  # before the fork
        self._worker = 0
        self._code: int | None = None  # the worker's exit code
        self._signals, self._signalled = socket.socketpair()

    def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the trainer decides; this process ends with it anyway
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
        self._signals.setblocking(False)
        self._signalled.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        keeper = os.getpid()
        self._worker = os.fork()
        if self._worker == 0:
            self._be_worker(keeper)
        self._work.close()
        self._tell(self._worker)
        self._wait()
        told = self._tell_code()  # at once, because killing the rest may take a moment
        ended = self._end_all()
        if not told:
            self._tell_code()
        os._exit(0 if ended else 1)

    def _prctl(self, option: int, value: int) -> None:
        self._libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)

    def _be_worker(self, keeper: int) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)  # the keeper was gone before the kernel was asked
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()  # its own group, so that signals that a reward sends to its group do not reach the keeper
        for end in (self._control, self._signals, self._signalled):
            end.close()
        code = 1
        try:
            from megatron_vcpo.rollout.rewards.worker import serve

            serve(self._work)
            code = 0
        except BaseException:  # noqa: BLE001 - a fork must not continue as its parent
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(code)

    def _wait(self) -> None:
        """Wait until the trainer asks for the end, the trainer is gone, or the worker has ended."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._signals, select.POLLIN)
        while os.getppid() == self._owner:
            self._reap()
            if self._code is not None:
                return
            for descriptor, _ in poll.poll(1000.0 * _GLANCE):
                if descriptor == self._control.fileno():
                    return  # the trainer never writes, so it has shut its side
                with contextlib.suppress(BlockingIOError):
                    self._signals.recv(4096)

    def _reap(self) -> bool:
        """Reap children that have ended; returns whether no child is left."""
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if child == 0:
                return False
            if child == self._worker:
                self._code = os.waitstatus_to_exitcode(status)

    def _end_all(self) -> bool:
        """Kill every descendant; returns whether none is left. A child's process id is not reused until it is reaped,
        so no other process is ever hit."""
        until = time.monotonic() + _GIVING_UP
        while time.monotonic() < until:
            if self._code is None:
                # Its whole group in one call, so that none of it can fork meanwhile.
                for end in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        end(self._worker, signal.SIGKILL)
            if self._reap():
                return True
            for child in _children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(_PAUSE)
        return self._reap()

    def _tell_code(self) -> bool:
        if self._code is None:
            return False
        self._tell(self._code)
        return True

    def _tell(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._control.send(REPORT.pack(number), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _children() -> Iterator[int]:
    """This process's children, including adopted ones whose parents have ended."""
    me = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()  # after the name, which may contain anything
        except OSError:
            continue
        if int(fields[1]) == me:
            yield int(name)
