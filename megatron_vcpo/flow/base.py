"""What every source of minibatches shares: the version of the weights, counters, timers and the log."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vcpo.config import PluginConfig
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.step.policy_step import PolicyStep
from megatron_vcpo.observability.metrics import MetricsFileError, MetricsLog, iteration_line
from megatron_vcpo.observability.trackers import Trackers
from megatron_vcpo.rollout.inputs import Inputs
from megatron_vcpo.runtime.agreement import raise_together

_RENAMED = {"pg_loss": "loss", "mismatch_k3": "mismatch_kl"}
_COUNTED = ("nonfinite_trajectories", "baseline_fallbacks", "vetoed")  # metrics whose mean, times N, is a count


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """What one optimizer step trains on."""

    trajectories: Sequence[Trajectory]
    lags: Sequence[int] = field(default_factory=list)  # age of each trajectory's oldest token, in optimizer steps
    retries: int = 0  # how often these trajectories were trained on before, without success
    excluded: frozenset[int] = frozenset()  # places of those that the step left out, set by the step

    @property
    def trained(self) -> list[Trajectory]:
        """The trajectories that the step did not leave out."""
        return [t for i, t in enumerate(self.trajectories) if i not in self.excluded]

    @property
    def lag_max(self) -> float:
        """Age of the oldest token."""
        return float(max(self.lags, default=0))

    @property
    def lag_mean(self) -> float:
        """Mean age of the trajectories."""
        return float(np.mean(self.lags)) if self.lags else 0.0


class BaseFlow:
    """What every source of minibatches shares: version, counters, timers and the log."""

    def __init__(self, args: argparse.Namespace, config: PluginConfig, inputs: Inputs) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        self.args = args
        self.config = config
        self.inputs = inputs
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.vocab_size = inputs.vocab_size
        self.version = 0  # optimizer steps that changed the weights
        self.counters: dict[str, float] = {}
        self.run_dir = Path(str(config.rollout.run_dir or args.save))  # set by now: folder_lock.py
        self._seconds: dict[str, float] = {}
        self._extra: dict[str, float] = {}
        self._log: MetricsLog | None = None
        self._trackers: Trackers | None = None

    # ------------------------------------------------------------------ what the plugin calls

    def start(self, *, model: list[Any], optimizer: Any) -> None:
        """Open the logs; called once, before the first step, after a saved state was loaded.

        Raises:
            MetricsFileError: on all ranks, where the first one cannot go on with metrics.jsonl.
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

    def next_minibatch(self, *, model: list[Any], step: PolicyStep, forward_backward: Any) -> StepBatch:
        """The trajectories of the coming step, identical on every rank."""
        raise NotImplementedError

    def after_step(self, metrics: dict[str, float], *, batch: StepBatch, success: bool, model: list[Any]) -> None:
        """Take a step's metrics: count, log, and move the version, or keep the trajectories of an overflow."""
        if success:
            self.version += 1
        else:
            self.count("skipped_steps", 1)
            if metrics.get("overflow") and batch.retries < self.config.vcpo.overflow_retries:
                self.put_back(batch)
                self.count("retried_steps", 1)
        for name in _COUNTED:
            self.count(name, round(metrics.get(name, 0.0) * len(batch.trajectories)))
        self.log(self._record(metrics, batch))

    def put_back(self, batch: StepBatch) -> None:
        """Make the trajectories of a step those of the next one too; a saved state keeps them."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what start() took; safe to call twice."""

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Version and counters."""
        return {"version": self.version, "counters": dict(self.counters)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; before start()."""
        self.version = int(state["version"])
        self.counters = {name: float(value) for name, value in state["counters"].items()}

    # ------------------------------------------------------------------ counting and logging

    def count(self, name: str, amount: float) -> None:
        """Add to a counter that lives as long as the run, over resumes."""
        self.counters[name] = self.counters.get(name, 0.0) + amount

    @contextlib.contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Add the seconds of the body to a phase of this iteration."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(phase, time.perf_counter() - started)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add to a phase of this iteration."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def say(self, sentence: str) -> None:
        """Tell the person, once over all ranks."""
        if self.args.rank == 0:
            print(f"megatron_vcpo: {sentence}", file=sys.stderr, flush=True)

    def log(self, record: dict[str, float]) -> None:
        """One iteration to metrics.jsonl, the console and Megatron's writers; what was timed belongs to it."""
        if self._log is not None:
            self._log.append(record)
            print(iteration_line(record), flush=True)
        if self._trackers is not None:
            self._trackers.log(record)
        self._seconds = {}
        self._extra = {}

    def _record(self, metrics: dict[str, float], batch: StepBatch) -> dict[str, float]:
        trained = batch.trained
        rewards = np.array([t.reward for t in trained], dtype=np.float64)
        record: dict[str, float] = {
            "iteration": int(self.args.curr_iteration) + 1,
            "train_iters": int(self.args.train_iters),
            "version": self.version,
            "lag_mean": batch.lag_mean,
            "lag_max": batch.lag_max,
        }
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
        for name, value in metrics.items():
            record.setdefault(_RENAMED.get(name, name), value)
        record |= self._extra
        record |= {f"count/{name}": value for name, value in self.counters.items()}
        return record | self._timed()

    def _timed(self) -> dict[str, float]:
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
