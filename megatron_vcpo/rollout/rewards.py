"""Rewards in worker processes, each with a deadline: code that judges model output may hang, crash or lie.

Whatever one reward does, it costs its own trajectory: an exception is caught in the worker, a reward past its deadline
is killed with its process, a process that dies is replaced.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import numbers
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_vcpo.environments import Environment, EnvironmentSetupError, Prompt, Split, make_environment

KINDS = ("raised", "timeout", "died", "invalid")
"""What can go wrong with a reward: an exception, its deadline, the end of its process, a result that is no number."""

LARGEST_REWARD = 3.4e38
"""Rewards are trained on in fp32: a larger one would be infinite there."""

_START_TIMEOUT = 300.0  # seconds for all workers to start and build their environments
_STALLED = 60.0  # seconds past a reward's deadline after which the pool must be broken
_CLOSING = 10.0  # seconds to wait for the pool's threads
_ROUNDS = 3  # pools that may break over one batch of rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """What became of one reward: a finite number, or None and the reason in one sentence."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    kind: str | None = None  # of the error, one of KINDS


class RewardPool:
    """Worker processes that hold an environment each. Use it as a context manager, or call `close()`.

    The processes are spawned: the script that owns the pool must guard its main part by
    `if __name__ == "__main__":`, and what it imports above that is imported by every worker too. A worker ends with the
    process that owns it, however that ends.
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
    ) -> None:
        """Start the workers, without waiting for them.

        Args:
            environment, split, seed, config, prompts_file: as for `make_environment`.
            workers: processes.
            timeout: deadline of one reward, from when it begins to run. Seconds.

        The first `judge` raises EnvironmentSetupError if a worker could not build the environment.
        """
        self._timeout = timeout
        self._workers = workers
        self._environment = (environment, split, seed, dict(config), prompts_file)
        self._pool: Any = None
        self._greetings: list[Any] = []
        self._open()

    def _open(self) -> None:
        from pebble import ProcessPool

        self._pool = ProcessPool(
            max_workers=self._workers,
            initializer=_start_worker,
            initargs=self._environment,
            context=multiprocessing.get_context("spawn"),
        )
        self._greetings = [self._pool.schedule(_greet) for _ in range(self._workers)]

    def judge(self, items: Sequence[tuple[Prompt, str]], *, progress: bool = False) -> list[RewardOutcome]:
        """The rewards of (prompt, response) pairs, in their order.

        Workers that die outside a reward (out of memory, a stray signal) can take the pool with them: it is made anew,
        and what it had not judged is judged again, a few times at most.
        """
        from tqdm import tqdm

        outcomes: dict[int, RewardOutcome] = {}
        with tqdm(total=len(items), desc="Rewards", unit="response", leave=False, disable=not progress) as bar:
            for _ in range(_ROUNDS):
                waiting = [i for i in range(len(items)) if i not in outcomes]
                if not waiting:
                    break
                if not self._pool.active:
                    self.close()
                    self._open()
                self._await_start()
                outcomes |= self._round({i: items[i] for i in waiting}, bar)
        died = RewardOutcome(reward=None, kind="died", error=f"the reward processes died {_ROUNDS} times")
        return [outcomes.get(i, died) for i in range(len(items))]

    def _round(self, items: Mapping[int, tuple[Prompt, str]], bar: Any) -> dict[int, RewardOutcome]:
        """What the pool, as it is, can judge of the items."""
        futures: dict[int, Any] = {}
        try:
            for i, pair in items.items():
                futures[i] = self._pool.schedule(_judge, args=pair, timeout=self._timeout)
        except RuntimeError:
            pass  # it broke while it was being given work: the next round gives the rest
        found: dict[int, RewardOutcome] = {}
        for i, future in futures.items():
            # Work is done in order: each is ready a deadline, and perhaps a restart, after the one before it.
            concurrent.futures.wait([future], timeout=self._timeout + _STALLED)
            if not future.done():
                self.close()  # a worker that died while it held the pool's lock: nothing will come any more
            outcome = self._outcome(future) if future.done() else None
            if outcome is not None:
                found[i] = outcome
                bar.update(1)
        return found

    def _await_start(self) -> None:
        while self._greetings:
            try:
                problem = self._greetings[-1].result(timeout=_START_TIMEOUT)
            except (concurrent.futures.TimeoutError, RuntimeError, OSError) as error:
                raise EnvironmentSetupError(f"A reward process could not start: {error}.") from error
            if problem is not None:
                raise EnvironmentSetupError(f"In a reward process: {problem}")
            self._greetings.pop()

    def _outcome(self, future: Any) -> RewardOutcome | None:
        """What a finished future holds; None where the pool itself was gone before it could be judged."""
        from pebble import ProcessExpired

        try:
            return future.result()
        except concurrent.futures.TimeoutError:
            return RewardOutcome(
                reward=None, kind="timeout", error=f"the reward took longer than {self._timeout:g} seconds"
            )
        except ProcessExpired as error:
            return RewardOutcome(
                reward=None, kind="died", error=f"the reward ended its process with exit code {error.exitcode}"
            )
        except (concurrent.futures.CancelledError, concurrent.futures.BrokenExecutor):
            return None
        except Exception as error:  # noqa: BLE001 - what the worker could not even report; counted like the others
            return RewardOutcome(reward=None, kind="raised", error=f"the reward raised {type(error).__name__}")

    def close(self) -> None:
        """End the workers at once; safe to call twice."""
        self._pool.stop()
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self._pool.join(timeout=_CLOSING)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# -- in the worker ---------------------------------------------------------------------------------------------------

_environment: Environment | None = None
_problem: str | None = None


def _start_worker(
    environment: str, split: Split, seed: int, config: Mapping[str, Any], prompts_file: str | None
) -> None:
    global _environment, _problem
    threading.Thread(target=_end_with_owner, daemon=True).start()
    try:
        _environment = make_environment(environment, split, seed, config, prompts_file)
    except EnvironmentSetupError as error:
        _problem = str(error)


def _end_with_owner() -> None:
    owner = multiprocessing.parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)


def _greet() -> str | None:
    return _problem


def _judge(prompt: Prompt, response: str) -> RewardOutcome:
    if _environment is None:
        return RewardOutcome(reward=None, kind="raised", error=_problem)
    try:
        return _checked(_environment.reward(prompt, response))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it costs this trajectory and is counted
        return RewardOutcome(
            reward=None, kind="raised", error=f"the reward raised {type(error).__name__}: {error}"[:500]
        )


def _checked(result: Any) -> RewardOutcome:
    parts = dict(result) if isinstance(result, Mapping) else {"reward": result}
    if "reward" not in parts:
        return RewardOutcome(
            reward=None, kind="invalid", error=f"the reward gave {sorted(parts)} without 'reward'"[:500]
        )
    values: dict[str, float] = {}
    for name, value in parts.items():
        number = value.item() if hasattr(value, "item") else value  # numpy scalars, booleans included
        if not isinstance(number, numbers.Real) or not abs(float(number)) <= LARGEST_REWARD:  # NaN fails it too
            return RewardOutcome(
                reward=None, kind="invalid", error=f"the reward gave {name}={value!r}"[:200] + ", not a finite number"
            )
        values[str(name)] = float(number)
    return RewardOutcome(reward=values.pop("reward"), parts=values)
