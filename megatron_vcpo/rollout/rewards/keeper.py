"""The process between the trainer and one reward worker: whatever ends, nothing of the worker is left.

    trainer --> keeper --> worker --> whatever the reward starts

A reward may hold the interpreter's lock, ignore signals, be stopped, or start processes of its own, also such that
leave its process group. The keeper runs none of that code. It ends the worker and all of its descendants when the
trainer asks, when the trainer is gone, however it went, and when the worker has ended. The kernel helps it:

* the worker asks to be killed with the keeper (PR_SET_PDEATHSIG: tied to the parent's thread, and a keeper has one);
* descendants whose parent ends become the keeper's children (PR_SET_CHILD_SUBREAPER), where it finds them all;
* a keeper that is stopped goes on when the trainer's thread that started it ends.

Out of reach are processes of another user (sudo in a reward), processes in an uninterruptible system call, and what a
reward leaves behind if it kills its keeper too, but for its process group, which the trainer ends.

Only the standard library is imported here: the worker is a fork of this process, which has to be small and to have one
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
"""What the keeper tells the trainer through the control socket: the worker's process id, then its exit code."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GLANCE = 1.0  # seconds between two looks at whether the trainer still lives
_GIVING_UP = 8.0  # seconds after which descendants that do not die are left to themselves
_PAUSE = 0.02  # seconds between two rounds of killing


def main() -> None:
    """Run by `RewardProcess`, in a session of its own.

    Arguments: sys.path (used by what starts this), the descriptors of the control and the work socket, the trainer's
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
            signal.signal(number, signal.SIG_IGN)  # the trainer decides; this process ends with it in any case
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
        told = self._tell_code()  # at once: to end the rest may take a moment
        ended = self._end_all()
        if not told:
            self._tell_code()
        os._exit(0 if ended else 1)

    def _prctl(self, option: int, value: int) -> None:
        self._libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)

    def _be_worker(self, keeper: int) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)  # it was gone before the kernel was asked
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()  # its own group, so that what a reward sends to its group does not reach the keeper
        for end in (self._control, self._signals, self._signalled):
            end.close()
        code = 1
        try:
            from megatron_vcpo.rollout.rewards.worker import serve

            serve(self._work)
            code = 0
        except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(code)

    def _wait(self) -> None:
        """Until the trainer asks for the end, is gone, or the worker has ended."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._signals, select.POLLIN)
        while os.getppid() == self._owner:
            self._reap()
            if self._code is not None:
                return
            for descriptor, _ in poll.poll(1000.0 * _GLANCE):
                if descriptor == self._control.fileno():
                    return  # the trainer says nothing: it has shut its side
                with contextlib.suppress(BlockingIOError):
                    self._signals.recv(4096)

    def _reap(self) -> bool:
        """Collect what has ended; whether no child is left."""
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
        """Kill every descendant; whether none is left. A child that is not yet reaped keeps its number, so none but
        one's own is ever hit."""
        until = time.monotonic() + _GIVING_UP
        while time.monotonic() < until:
            if self._code is None:
                # Its group too, in one call: nobody in it can fork on meanwhile.
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
    """This process's children, those included whose parents have ended."""
    me = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()  # after the name, which may hold anything
        except OSError:
            continue
        if int(fields[1]) == me:
            yield int(name)
