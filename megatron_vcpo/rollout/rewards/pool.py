"""Rewards in worker processes, each with a deadline: code that judges model output may hang, crash or lie.

Whatever one reward does, only its own trajectory is lost: an exception is caught in the worker, a reward beyond its
deadline is killed with its process and everything it started, and a process that dies is replaced. Every wait is
bounded: a batch of rewards takes at most the sum of its rewards' deadlines, spread over the workers, and one start of a
worker.

The pool is the trainer's side. Each worker (worker.py) holds the environment, and has a keeper (keeper.py), which kills
it.
"""

from __future__ import annotations

import itertools
import math
import pickle
import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_vcpo.environments import EnvironmentSetupError, Prompt, Split
from megatron_vcpo.rollout.rewards.outcome import RewardOutcome, rejected
from megatron_vcpo.rollout.rewards.process import RewardProcess, StrayMessage

_START_TIMEOUT = 300.0  # seconds for a worker to start and build its environment
_STARTS = 5  # consecutive starts that may fail after a worker has once started
_AGAIN = 1.0  # seconds until the next attempt if no process can be started
_OFFERS = 3  # processes that may end or stall before they begin with a reward they were given
_CLOSING = 10.0  # seconds to wait for processes to end; longer than a keeper tries to kill


@dataclass(slots=True)
class _RewardBatch:
    """The work of one call of `judge`."""

    items: Sequence[tuple[Prompt, str]]
    limit: float  # time.monotonic() at which whatever is left is rejected
    waiting: deque[int]  # indices that no process works on
    outcomes: dict[int, RewardOutcome] = field(default_factory=dict)
    offers: dict[int, int] = field(default_factory=dict)  # index -> how often it came back before its process had begun


class RewardPool:
    """Worker processes, each with an environment. Use it as a context manager, or call `close()`.

    The processes are separate programs that import the environment by its name, so it must not be defined in the main
    script. A worker and everything its rewards start end with the process that owns the pool, however that ends.
    """

    def __init__(
        self,
        environment: str,
        *,
        split: Split,
        seed: int,
        config: Mapping[str, Any],
        prompts_file: str | None = None,
        workers: int,
        timeout: float,
        start_timeout: float = _START_TIMEOUT,
    ) -> None:
        """Start the workers, without waiting for them.

        Args:
            environment, split, seed, config, prompts_file: as for `make_environment`.
            workers: number of processes.
            timeout: seconds for one reward, from when a worker begins with it.
            start_timeout: seconds for the environment's constructor in a worker.

        The first `judge` raises EnvironmentSetupError if a worker could not build the environment.
        """
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._margin = start_timeout  # seconds for a batch in addition to its rewards' deadlines
        self._workers = workers
        self._setup = pickle.dumps((environment, split, seed, dict(config), prompts_file))
        self._selector = selectors.DefaultSelector()
        self._processes: list[RewardProcess] = []
        self._ending: list[RewardProcess] = []
        self._numbers = itertools.count()
        self._proven = False  # a worker has started successfully at least once
        self._failed_starts = 0  # since the last successful start
        self._fill()

    def judge(self, items: Sequence[tuple[Prompt, str]]) -> list[RewardOutcome]:
        """The rewards of (prompt, response) pairs, in order.

        Returns within `start_timeout` + ceil(items / workers) * `timeout` seconds. Pairs that are not judged by then,
        because workers had to be restarted again and again, are rejected. A worker that ends between rewards costs
        nothing.

        Raises:
            EnvironmentSetupError: workers do not start.
        """
        now = time.monotonic()
        limit = now + self._margin + math.ceil(len(items) / self._workers) * self._timeout
        batch = _RewardBatch(items, limit, deque(range(len(items))))
        if not self._proven:
            for process in self._processes:
                process.deadline = now + self._start_timeout  # the start was not watched before
        try:
            self._listen(batch, 0.0)
            while len(batch.outcomes) < len(items):
                self._fill()
                self._hand_out(batch)
                due = min([batch.limit, *(process.deadline for process in self._processes)])
                if len(self._processes) < self._workers:
                    due = min(due, time.monotonic() + _AGAIN)
                self._listen(batch, due - time.monotonic())
                if time.monotonic() >= due:
                    # This process may have been stopped or starved of CPU: answers that arrived meanwhile count.
                    self._listen(batch, 0.0)
                    self._expire(batch)
        finally:
            for process in [process for process in self._processes if process.task is not None]:
                self._drop(process)
        self._fill()
        return [batch.outcomes[i] for i in range(len(items))]

    # -- the loop --------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start processes up to the number wanted, and forget those that have ended."""
        self._ending = [process for process in self._ending if not process.ended()]
        while len(self._processes) < self._workers:
            try:
                process = RewardProcess(self._setup, self._selector, time.monotonic() + self._start_timeout)
            except OSError as error:
                self._failed_start(f"A reward process could not be started: {error}.")
                return
            self._processes.append(process)

    def _hand_out(self, batch: _RewardBatch) -> None:
        for process in self._processes:
            while batch.waiting and process.ready and process.task is None and not process.gone:
                i = batch.waiting.popleft()
                try:
                    pair = pickle.dumps(batch.items[i], pickle.HIGHEST_PROTOCOL)
                except Exception as error:  # noqa: BLE001 - the prompt's own code failed; costs only its trajectory
                    said = f"the prompt could not be pickled for a reward process: {type(error).__name__}"
                    batch.outcomes[i] = rejected("raised", said)
                    continue
                process.give(i, next(self._numbers), pair, time.monotonic() + self._timeout)

    def _listen(self, batch: _RewardBatch, seconds: float) -> None:
        """Wait up to `seconds` for messages, and handle those that have arrived."""
        for process in {key.data: None for key, _ in self._selector.select(max(0.0, seconds))}:
            try:
                for message in process.messages():
                    self._take(batch, process, message)
            except StrayMessage:
                said = "it wrote to a descriptor that was not its own"
                self._lost(batch, process, said)
                continue
            if process.gone:
                self._lost(batch, process, process.end_in_words)

    def _take(self, batch: _RewardBatch, process: RewardProcess, message: dict[str, Any]) -> None:
        match message:
            case {"problem": None} if not process.ready:
                process.ready, self._proven, self._failed_starts = True, True, 0
                process.rest()
            case {"problem": str(problem)} if not process.ready:
                self._drop(process)
                self._failed_start(f"In a reward process: {problem}")
            case {"taken": process.number} if process.task is not None:
                process.taken, process.deadline = True, time.monotonic() + self._timeout
            case {"number": process.number, "outcome": dict(outcome)} if process.taken and process.task is not None:
                try:
                    batch.outcomes[process.task] = RewardOutcome(**outcome)
                except TypeError:
                    raise StrayMessage from None
                process.rest()
            case _:
                raise StrayMessage

    def _lost(self, batch: _RewardBatch, process: RewardProcess, reason: str) -> None:
        """Handle a process that has ended by itself."""
        self._drop(process)
        if not process.ready:
            self._failed_start(f"A reward process could not start: {reason} while it built the environment.")
        elif process.task is not None:
            self._settle(batch, process, rejected("died", f"the reward's process is gone: {reason}"))

    def _settle(self, batch: _RewardBatch, process: RewardProcess, outcome: RewardOutcome) -> None:
        """Settle the task of a process that is gone: reject it, or let another process try if this one never began."""
        assert process.task is not None
        offers = batch.offers[process.task] = batch.offers.get(process.task, 0) + 1
        if process.taken or offers >= _OFFERS:
            batch.outcomes[process.task] = outcome
        else:
            batch.waiting.appendleft(process.task)
        process.rest()

    def _expire(self, batch: _RewardBatch) -> None:
        """End processes beyond their deadline, and the whole batch if it is beyond its own."""
        now = time.monotonic()
        over = now >= batch.limit
        for process in list(self._processes):
            late = process.deadline <= now
            if process.task is not None and (late or over):
                self._drop(process)
                said = f"the reward took longer than {self._timeout:g} seconds" if late else self._too_late
                self._settle(batch, process, rejected("timeout", said))
            elif not process.ready and late:
                self._drop(process)
                self._failed_start(
                    f"A reward process could not start: its environment was not built in {self._start_timeout:g} "
                    "seconds.",
                    hopeless=not any(other.ready for other in self._processes),
                )
        if over:
            for i in batch.waiting:
                batch.outcomes[i] = rejected("timeout", self._too_late)
            batch.waiting.clear()

    @property
    def _too_late(self) -> str:
        return (
            "the reward was not judged in the time of the batch "
            f"({self._timeout:g} seconds for each, {self._margin:g} to start a process): reward processes had "
            "to be started again and again"
        )

    def _failed_start(self, sentence: str, *, hopeless: bool = False) -> None:
        self._failed_starts += 1
        if hopeless or not self._proven or self._failed_starts >= _STARTS:
            raise EnvironmentSetupError(sentence)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _drop(self, process: RewardProcess) -> None:
        self._processes.remove(process)
        process.end()
        self._ending.append(process)

    def close(self) -> None:
        """End the workers and everything they started; safe to call twice."""
        for process in list(self._processes):
            self._drop(process)
        until = time.monotonic() + _CLOSING
        for process in self._ending:
            process.close(until)
        self._ending = []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
