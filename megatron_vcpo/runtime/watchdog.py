"""Watchdog: ends a run whose ranks no longer meet, with a sentence that says who is missing and where.

A collective that some rank never enters would end, after --distributed-timeout-minutes, in an error that names neither
the rank nor the phase. Here, a thread in each process writes where the process stands to the rendezvous store, at each
new phase and a few times per deadline, and reads the others' only when its own process stands still. Nothing runs in
the training thread.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import distributed as dist

from megatron_vcpo.runtime import phases

EXIT_CODE = 4
_BEATS_PER_DEADLINE = 20
_LONGEST_INTERVAL = 15.0  # seconds between two signs of life in a phase that goes on
_WRITES = 1000.0  # of all ranks to the store, each second at most: phases that follow faster are not all told
_GLANCE = 1.0  # seconds between two looks at whether torchrun still lives
_LAST_WORDS = 5.0  # seconds to write a message and to flush stdout before the process ends without
_ENDING = 0.1  # seconds in which a process whose sockets are closed ends
_SHOWN = 8  # ranks named in a message
# What gloo and NCCL say where another process has ended.
_GONE = re.compile(r"connection (closed|reset|refused)|broken pipe|timed? ?out|remote process exit", re.IGNORECASE)
# Python files whose innermost frame waits for other ranks.
_WAITING_IN = ("torch/distributed/", "megatron/core/pipeline_parallel/p2p_communication", "megatron/core/distributed/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a rank stood at its last sign of life."""

    rank: int
    number: int  # of the phase
    phase: str
    iteration: int
    alone: bool
    seconds: float  # in the phase
    waiting: float  # of these, in the collective that it is still in; 0 outside of collectives
    place: str  # function and line
    beat: int  # signs of life so far
    process: int = 0  # its number on the machine
    machine: str = ""  # where that number means something
    alive: bool = True  # gave another one since the table was read before

    def __str__(self) -> str:
        if self.alive:
            return f"rank {self.rank} {self.where}"
        return f"rank {self.rank}, last seen {self.where} and without a sign of life since"

    @property
    def where(self) -> str:
        """In words."""
        return f"in phase '{self.phase}' of iteration {self.iteration} at {self.place}"


def verdict(standings: Sequence[Standing | None], deadline: float) -> str | None:
    """Who keeps the others waiting; None while nobody does.

    Args:
        standings: one for each rank, in order; None for a rank that never gave a sign of life.
        deadline: seconds.
    """
    known = [s for s in standings if s is not None]
    front = max((s.number for s in known if s.alive), default=0)
    first = [s for s in known if s.number == front and s.alive and not s.alone and s.seconds >= deadline]
    if not first:
        return None
    unborn = [f"rank {rank}, which never began" for rank, s in enumerate(standings) if s is None]
    missing = unborn + [str(s) for s in known if not s.alive or s.number < front]
    if not missing:
        stuck = [s for s in first if s.waiting >= deadline]
        if not stuck:
            return None  # all ranks are in one phase, and it is only long
        missing = [str(s) for s in known if s.waiting == 0.0]
        if not missing:
            places = {s.place: str(s) for s in reversed(known)}
            where = _listed(list(reversed(places.values())))
            if len(places) == 1:
                return f"all ranks wait in one collective that does not end, for {deadline:.0f} s at least: {where}"
            return f"ranks wait in different collectives for one another: {where}"
        first = stuck
    waiting = f"rank {first[0].rank}" + (f" and {len(first) - 1} more" if len(first) > 1 else "")
    return (
        f"{waiting} waited {first[0].seconds:.0f} s in phase '{first[0].phase}' of iteration {first[0].iteration} "
        f"(at {first[0].place}) for {_listed(missing)}"
    )


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more ranks" if len(items) > _SHOWN else ""
    return "; ".join(items[:_SHOWN]) + more


class Watchdog:
    """Watches one process and, through the store, the others.

    Args:
        store: the rendezvous store; the watchdog takes a connection of its own.
        rank: of this process.
        world_size: number of processes.
        deadline: seconds that ranks may wait for another in one phase.
        end: called with the message when the deadline has passed; prints it and ends the process.
    """

    def __init__(
        self, store: Any, *, rank: int, world_size: int, deadline: float, end: Callable[[str], None] | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.deadline = deadline
        self.interval = min(deadline / _BEATS_PER_DEADLINE, _LONGEST_INTERVAL)
        self._gap = min(world_size / _WRITES, self.interval)  # seconds between two writes
        self._store = dist.PrefixStore("megatron_vcpo/watchdog", store.clone())
        self._end = end or _end_process
        self._watched = _MainThread()
        self._first: list[Standing | None] = []  # the standings when this process was found to stand still
        self._first_at = 0.0
        self._beat = 0
        self._machine = _machine()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron_vcpo watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch the thread that calls this."""
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """End the watch; safe to call twice."""
        self._stop.set()
        phases.entered.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def explain(self, error: BaseException) -> str:
        """Where this process failed and, when a collective failed, which ranks have ended or were elsewhere."""
        phase = phases.current()
        said = f"rank {self.rank} failed in phase '{phase.name}' of iteration {phase.iteration}"
        if not failed_in_collective(error):
            return said
        try:
            self._write()  # others that explain themselves now are to see this phase, not the one before
            table = self._read([])
        except RuntimeError:
            return f"{said}, and the rendezvous store does not answer: the process that held it has ended"
        ended = self._ended(table)
        if ended:
            names = _listed([f"rank {s.rank} has ended, last seen {s.where}" for s in ended])
            return f"{said}, since a process that it waited for is gone: {names}"
        others = [
            f"rank {rank}, which never began" if s is None else str(s)
            for rank, s in enumerate(table)
            if rank != self.rank and (s is None or s.number != phase.number)
        ]
        elsewhere = f"; last seen elsewhere: {_listed(others)}" if others else ""
        return f"{said}: a rank that it waited for has ended or did not come{elsewhere}"

    def _ended(self, table: Sequence[Standing | None]) -> list[Standing]:
        """The ranks of this machine whose processes have ended."""
        near = [s for s in table if s is not None and s.machine == self._machine and s.rank != self.rank]
        until = time.monotonic() + _ENDING
        while True:
            ended = [s for s in near if _has_ended(s.process)]
            if ended or time.monotonic() >= until:
                return ended
            time.sleep(_ENDING / 10.0)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._gap):
                phases.entered.wait(self.interval - self._gap)
                phases.entered.clear()
                if self._stop.is_set():
                    return
                self._write()
                self._look()
        except RuntimeError as error:  # the store is gone: with a process that ended, well or not
            while not self._stop.wait(self.interval):
                if not phases.current().alone and self._seconds() >= self.deadline:
                    self._end(
                        f"rank {self.rank} waited {self._seconds():.0f} s in phase '{phases.current().name}', and the "
                        f"rendezvous store does not answer ({error}): the process that holds it has ended."
                    )
                    return

    def _seconds(self) -> float:
        return time.monotonic() - phases.current().since

    def _write(self) -> None:
        phase, seconds = phases.current(), self._seconds()
        place, waiting = self._watched.sample(track=seconds > 2.0 * self.interval)
        self._beat += 1
        standing = Standing(
            rank=self.rank,
            number=phase.number,
            phase=phase.name,
            iteration=phase.iteration,
            alone=phase.alone,
            seconds=seconds,
            waiting=waiting,
            place=place,
            beat=self._beat,
            process=os.getpid(),
            machine=self._machine,
        )
        self._store.set(str(self.rank), json.dumps(dataclasses.asdict(standing)))

    def _read(self, before: Sequence[Standing | None]) -> list[Standing | None]:
        """Every rank's standing; one that gave no sign since the reading `before` is dead."""
        keys = [str(rank) for rank in range(self.world_size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        found: list[Standing | None] = [None] * self.world_size
        for key, value in zip(keys, self._store.multi_get(keys)):
            earlier = before[int(key)] if before else None
            standing = Standing(**json.loads(value))
            alive = earlier is None or standing.beat > earlier.beat
            found[int(key)] = dataclasses.replace(standing, alive=alive)
        return found

    def _look(self) -> None:
        """Read the others' standings where this process stands still, and end it where it waits in vain."""
        grace = 3.0 * self.interval  # in which every living rank gives a sign
        now = time.monotonic()
        if phases.current().alone or self._seconds() < self.deadline - 2.0 * grace:
            self._first = []
            return
        if not self._first:
            self._first, self._first_at = self._read([]), now
            return
        if now - self._first_at < grace:
            return
        table = self._read(self._first)
        said = verdict(table, self.deadline - grace)
        if said is None:
            self._first = []
            return
        if self.rank != min(s.rank for s in table if s is not None and s.alive):
            self._stop.wait(grace)  # one rank tells; the others do where it could not
            if self._stop.is_set():
                return
        self._end(
            f"{said}. All processes end. If that phase is only slow, raise --vcpo-phase-deadline ({self.deadline:g} s) "
            "and --distributed-timeout-minutes; if not, read the output of the ranks named."
        )
        self._stop.set()


class _MainThread:
    """Where the thread that made this object executes, and for how long it has been in one collective."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        # Held so that a later call cannot have the same identity. Its locals, the tensors of one collective, live one
        # interval too long at most, and only in a phase that is slow already.
        self._held: FrameType | None = None
        self._since = 0.0

    def sample(self, *, track: bool) -> tuple[str, float]:
        """('function (file:line)', seconds in the collective that is still running)."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            self._held = None
            return "its end", 0.0
        place = _place(frame)
        if not track or not _waits(frame.f_code.co_filename):
            self._held = None
            return place, 0.0
        now = time.monotonic()
        if frame is not self._held:
            self._held, self._since = frame, now
        return place, max(now - self._since, 1e-9)


def _waits(filename: str) -> bool:
    return any(part in filename.replace(os.sep, "/") for part in _WAITING_IN)


def _place(frame: FrameType) -> str:
    """The innermost function, and the first line outside torch that led there."""
    name, outside = frame.f_code.co_name, frame
    while outside.f_back is not None and "/torch/" in outside.f_code.co_filename.replace(os.sep, "/"):
        outside = outside.f_back
    where = f"{'/'.join(outside.f_code.co_filename.split(os.sep)[-2:])}:{outside.f_lineno}"
    return f"{name} ({where})" if outside is not frame else f"{outside.f_code.co_name} ({where})"


def _machine() -> str:
    """Where process numbers mean the same: containers may share a name, and have numbers of their own."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _has_ended(process: int) -> bool:
    """Also before its parent has collected it."""
    try:
        stat = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return True
    return stat.rpartition(b")")[2].split()[0] in b"ZX"


def failed_in_collective(error: BaseException) -> bool:
    """Whether an exception came out of a call that waits for other ranks."""
    trace: TracebackType | None = error.__traceback__
    if not isinstance(error, RuntimeError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return _waits(trace.tb_frame.f_code.co_filename)


def peer_is_gone(error: BaseException) -> bool:
    """Whether a collective failed for the end of another process, so that a trace of this one explains nothing."""
    return failed_in_collective(error) and _GONE.search(str(error)) is not None


def end_with_torchrun(rank: int) -> None:
    """Watch, in a thread, whether the torchrun that started this process is still there, and end with it.

    torchrun ends its ranks itself, unless it is killed: they would train on with nobody to end them. Another parent,
    such as a shell, may go away as it likes.
    """
    owner = os.getppid()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(_GLANCE)
        _end_process(
            f"rank {rank} ends: torchrun (process {owner}), which started it, is gone. Go on from the last checkpoint "
            "with --load."
        )

    threading.Thread(target=watch, name="megatron_vcpo torchrun watch", daemon=True).start()


def _end_process(message: str) -> None:
    """Say why and end the process, whatever its other threads hold.

    Neither through logging nor through sys.stderr: the training thread may be stuck with their locks. Flushing stdout
    needs such a lock, and a pipe may be full, so that both have a limited time.
    """

    def speak() -> None:
        os.write(2, f"megatron_vcpo: {message}\n".encode(errors="backslashreplace"))
        sys.stdout.flush()

    speaker = threading.Thread(target=speak, name="megatron_vcpo last words", daemon=True)
    speaker.start()
    speaker.join(_LAST_WORDS)
    os._exit(EXIT_CODE)  # the training thread is in a call that nothing interrupts
