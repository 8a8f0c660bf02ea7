"""Loop: what all loops over optimizer steps share, whatever the source of their minibatches."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import Any

from megatron_vcpo.config import PluginConfig
from megatron_vcpo.data.minibatch import Minibatch
from megatron_vcpo.flow.journal import Journal, step_record
from megatron_vcpo.flow.trainer import Trainer
from megatron_vcpo.mcore.step.outcome import StepOutcome, Verdict
from megatron_vcpo.rollout.inputs import Inputs
from megatron_vcpo.runtime.logs import log_single_rank

logger = logging.getLogger(__name__)

_COUNTED = ("nonfinite_trajectories", "baseline_fallbacks", "vetoed")  # metrics whose mean, times N, is a count


class Loop:
    """Drives one optimizer step after the other; every rank does the same.

    Subclasses define `iteration`; `settle` decides what a step's outcome changes.
    """

    def __init__(self, args: argparse.Namespace, config: PluginConfig, inputs: Inputs) -> None:
        """Args: Megatron's validated arguments, the plugin's, and what was opened before the start."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        self.args = args
        self.config = config
        self.inputs = inputs
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.run_dir = Path(str(config.rollout.run_dir or args.save))  # set by now: launch/folder_lock.py
        self.version = 0  # number of optimizer steps that changed the weights
        self.journal = Journal(args, self.run_dir)

    # ------------------------------------------------------------------ for subclasses

    def start(self, *, model: list[Any], optimizer: Any) -> None:
        """Open the logs. Called once, after a saved state was loaded and before the first step."""
        self.journal.open()

    def iteration(self, trainer: Trainer) -> None:
        """One optimizer step, with everything before and after it."""
        raise NotImplementedError

    def put_back(self, minibatch: Minibatch) -> None:
        """Make the minibatch that was just taken the next one again; a saved state keeps it."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what start() acquired; safe to call twice."""

    # ------------------------------------------------------------------ parts of an iteration

    def train(self, trainer: Trainer, minibatch: Minibatch) -> StepOutcome:
        """One optimizer step."""
        with self.journal.timer("train"):
            outcome = trainer.train(minibatch)
        if outcome.verdict is Verdict.SKIPPED:
            sentence = f"iteration {self.args.curr_iteration + 1} was skipped: {outcome.reason}."
            log_single_rank(logger, logging.WARNING, sentence)
        return outcome

    def settle(self, minibatch: Minibatch, outcome: StepOutcome) -> None:
        """Advance the version, or keep the minibatch of an overflow for another try; update the counters."""
        if outcome.trained:
            self.version += 1
        else:
            self.journal.count("skipped_steps", 1)
        if outcome.verdict is Verdict.OVERFLOW and minibatch.retries < self.config.vcpo.overflow_retries:
            self.put_back(dataclasses.replace(minibatch, retries=minibatch.retries + 1))
            self.journal.count("retried_steps", 1)
        for name in _COUNTED:
            self.journal.count(name, round(outcome.metrics.get(name, 0.0) * len(minibatch.trajectories)))

    def log(self, minibatch: Minibatch, outcome: StepOutcome) -> None:
        """Write the iteration's line."""
        self.journal.write(self.record(minibatch, outcome))

    def record(self, minibatch: Minibatch, outcome: StepOutcome) -> dict[str, float]:
        """The metrics of the iteration's line."""
        place = {
            "iteration": int(self.args.curr_iteration) + 1,
            "train_iters": int(self.args.train_iters),
            "version": self.version,
        }
        return place | step_record(minibatch, outcome) | place  # a loss may have metrics of the same names

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the loop: version and counters."""
        return {"version": self.version, "counters": dict(self.journal.counters)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. Call it before start()."""
        self.version = int(state["version"])
        self.journal.counters = {name: float(value) for name, value in state["counters"].items()}
