"""Journal: counts, times and logs a run."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from megatron_vcpo.data.minibatch import Minibatch
from megatron_vcpo.mcore.step.outcome import StepOutcome
from megatron_vcpo.observability.metrics import MetricsFileError, MetricsLog, iteration_line
from megatron_vcpo.observability.trackers import Trackers
from megatron_vcpo.runtime.agreement import raise_together

_RENAMED = {"pg_loss": "loss", "mismatch_k3": "mismatch_kl"}


class Journal:
    """Counters over the whole run, the seconds of each iteration's phases, and one line for each iteration."""

    def __init__(self, args: argparse.Namespace, run_dir: Path) -> None:
        """Args: Megatron's arguments; the folder of metrics.jsonl."""
        self.args = args
        self.run_dir = run_dir
        self.counters: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._values: dict[str, float] = {}
        self._log: MetricsLog | None = None
        self._trackers: Trackers | None = None

    def open(self) -> None:
        """Open the logs. Call it on all ranks, after a saved state has been loaded.

        Raises:
            MetricsFileError: on all ranks, if the first one cannot continue metrics.jsonl.
        """
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        failure: MetricsFileError | None = None
        if self.args.rank == 0:
            try:
                self._log = MetricsLog(self.run_dir, resume_iteration=self.args.iteration)
            except MetricsFileError as error:
                failure = error
            except OSError as error:
                failure = MetricsFileError(
                    f"the metrics file in {self.run_dir} could not be opened ({error}); make room or the folder "
                    "writable, or choose another one with --rollout-run-dir."
                )
        raise_together(failure)
        self._trackers = Trackers(get_tensorboard_writer(), get_wandb_writer())

    def count(self, name: str, amount: float) -> None:
        """Add to a counter of the run."""
        self.counters[name] = self.counters.get(name, 0.0) + amount

    @contextlib.contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Add the duration of the body to a phase of this iteration."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(phase, time.perf_counter() - started)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase of this iteration."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def add(self, values: Mapping[str, float]) -> None:
        """Add metrics to this iteration's record, besides its step's own."""
        self._values |= values

    def write(self, record: Mapping[str, float]) -> None:
        """Write an iteration's metrics and times to metrics.jsonl, the console and Megatron's writers."""
        timed = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        counted = {f"count/{name}": value for name, value in self.counters.items()}
        whole = {**record, **self._values, **counted, **timed}
        if self._log is not None:
            self._log.append(whole)
            print(iteration_line(whole), flush=True)
        if self._trackers is not None:
            self._trackers.log(whole)
        self._seconds = {}
        self._values = {}


def step_record(minibatch: Minibatch, outcome: StepOutcome) -> dict[str, float]:
    """The metrics of a step: those of its minibatch and its outcome."""
    trained = [t for i, t in enumerate(minibatch.trajectories) if i not in outcome.excluded]
    rewards = np.array([t.reward for t in trained], dtype=np.float64)
    record: dict[str, float] = {"lag_mean": minibatch.lag_mean, "lag_max": minibatch.lag_max}
    if len(rewards):
        record |= {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "response_length": float(np.mean([len(t.response_ids) for t in trained])),
            "truncated": float(np.mean([t.truncated for t in trained])),
        }
    for name in sorted({name for t in trained for name in t.reward_parts}):
        parts = [t.reward_parts[name] for t in trained if name in t.reward_parts]
        record[f"reward/{name}"] = float(np.mean(parts))
    for name, value in outcome.metrics.items():
        record.setdefault(_RENAMED.get(name, name), value)
    return record
