"""RewardPool: rewards in processes of their own, each with a hard deadline.

A reward that raises, hangs, dies or returns no number costs the one trajectory it judged. The workers import nothing but
the environment: no torch, no Megatron, no engine.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from pebble import ProcessExpired, ProcessPool

from megatron_vcpo.environments import Environment, Prompt, Split, make_environment

_environment: Environment | None = None  # of a worker process


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """A reward and its parts, or why there is none."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


class RewardPool:
    """Judges responses in worker processes; use as a context manager or close()."""

    def __init__(
        self,
        environment: str,
        *,
        split: Split,
        seed: int,
        config: dict[str, Any],
        prompts_file: str | None,
        workers: int,
        timeout: float,
    ) -> None:
        """Args: those of `make_environment`; workers: processes; timeout: deadline of one reward, seconds."""
        self.timeout = timeout
        # spawn: a fork of a process with a running engine and its threads can deadlock.
        self._pool = ProcessPool(
            max_workers=workers,
            context=multiprocessing.get_context("spawn"),
            initializer=_build,
            initargs=[environment, split, seed, config, prompts_file],
        )

    def judge(self, items: Sequence[tuple[Prompt, str]]) -> list[RewardOutcome]:
        """Rewards of (prompt, response) pairs, in order; never raises for a reward's own failure."""
        futures = [self._pool.schedule(_judge, args=[prompt, text], timeout=self.timeout) for prompt, text in items]
        return [self._outcome(future) for future in futures]

    def _outcome(self, future: Any) -> RewardOutcome:
        try:
            return to_outcome(future.result())
        except FutureTimeoutError:
            return RewardOutcome(
                reward=None, error=f"the reward took longer than --rollout-reward-timeout ({self.timeout:g} s)"
            )
        except ProcessExpired as error:
            return RewardOutcome(reward=None, error=f"the reward's process died (exit code {error.exitcode})")
        except _RewardError as error:
            return RewardOutcome(reward=None, error=str(error))

    def close(self) -> None:
        """End the workers; what is still running is killed."""
        self._pool.stop()
        with contextlib.suppress(FutureTimeoutError):
            self._pool.join(timeout=5)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _RewardError(RuntimeError):
    """A reward function raised; the text names the error."""


def to_outcome(value: Any) -> RewardOutcome:
    """Check what an environment returned: a finite number, or a mapping of them with the key 'reward'."""
    parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in parts:
        return RewardOutcome(reward=None, error=f"the reward's mapping has no key 'reward' ({', '.join(map(str, parts))})")
    for name, part in parts.items():
        if isinstance(part, str | bytes) or not hasattr(part, "__float__"):
            return RewardOutcome(reward=None, error=f"the reward's {name} is {part!r}, not a number")
        if not math.isfinite(float(part)):
            return RewardOutcome(reward=None, error=f"the reward's {name} is {float(part)}")
    numbers = {str(name): float(part) for name, part in parts.items()}
    return RewardOutcome(reward=numbers.pop("reward"), parts=numbers)


def _build(environment: str, split: Split, seed: int, config: dict[str, Any], prompts_file: str | None) -> None:
    global _environment
    _environment = make_environment(environment, split=split, seed=seed, config=config, prompts_file=prompts_file)


def _judge(prompt: Prompt, response: str) -> Any:
    assert _environment is not None
    try:
        value = _environment.reward(prompt, response)
    except Exception as error:
        raise _RewardError(f"the reward raised {type(error).__name__}: {error}") from None
    return dict(value) if isinstance(value, Mapping) else value
