"""The policy's interface for a loop: train on a minibatch, score trajectories."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron_vcpo.data.minibatch import Minibatch
from megatron_vcpo.data.trajectory import Float32Array, Trajectory
from megatron_vcpo.flow.feed import TrajectoryFeed
from megatron_vcpo.flow.journal import Journal
from megatron_vcpo.mcore.step.outcome import StepOutcome, Verdict
from megatron_vcpo.mcore.step.policy_step import PolicyStep
from megatron_vcpo.runtime import phases
from megatron_vcpo.runtime.logs import log_single_rank

logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """What a loop needs of the policy in one iteration."""

    step: PolicyStep
    model: list[Any]
    forward_backward: Callable[..., list[Any]]

    def train(self, minibatch: Minibatch) -> StepOutcome:
        """Make one optimizer step; its outcome is never REPEAT."""

    def logprobs_of(self, trajectories: Sequence[Trajectory]) -> dict[int, Float32Array]:
        """See `PolicyStep.logprobs_of`."""


class MegatronTrainer:
    """One call of Megatron's train_step.

    Args:
        step: the plugin's part of the call.
        feeds: the iterators from which Megatron takes micro-batches, one for each model chunk.
        train_step: Megatron's own function.
        call: the arguments that Megatron called it with.
        journal: counts repeated steps.
    """

    def __init__(
        self,
        *,
        step: PolicyStep,
        feeds: Sequence[TrajectoryFeed],
        train_step: Callable[..., Any],
        call: inspect.BoundArguments,
        journal: Journal,
    ) -> None:
        self.step = step
        self.model: list[Any] = call.arguments["model"]
        self.forward_backward: Callable[..., list[Any]] = call.arguments["forward_backward_func"]
        self.result: Any = None  # what Megatron's train_step returned
        self._feeds = feeds
        self._train_step = train_step
        self._call = call
        self._journal = journal

    def logprobs_of(self, trajectories: Sequence[Trajectory]) -> dict[int, Float32Array]:
        """See `PolicyStep.logprobs_of`."""
        return self.step.logprobs_of(trajectories, model=self.model, forward_backward=self.forward_backward)

    def train(self, minibatch: Minibatch) -> StepOutcome:
        """See `Trainer.train`: repeats the step until no further trajectory has to be left out."""
        while True:
            outcome = self._attempt(minibatch)
            if outcome.verdict is not Verdict.REPEAT:
                return outcome
            self._journal.count("repeated_steps", 1)
            log_single_rank(
                logger,
                logging.WARNING,
                f"iteration {self._journal.args.curr_iteration + 1} is made again without {len(outcome.excluded)} of "
                f"{len(minibatch.trajectories)} trajectories, which are not finite under the policy.",
            )

    def _attempt(self, minibatch: Minibatch) -> StepOutcome:
        step, schedule = self.step, self.forward_backward
        phases.enter("score")
        step.begin(minibatch.trajectories, model=self.model, forward_backward=schedule, lag=minibatch.lag_max)
        for feed in self._feeds:
            feed.fill(step.data_iterator())
        # Megatron's own calculator keeps the nominal number, because train() asserts that it never falls.
        actual = {
            "num_microbatches": step.num_micro_batches,
            "seq_length": step.sequence_length,
            "decoder_seq_length": step.sequence_length,
        }
        self._call.arguments["forward_backward_func"] = lambda **options: schedule(**{**options, **actual})
        success, grad_norm = False, None
        phases.enter("forward and backward")
        try:
            self.result = self._train_step(*self._call.args, **self._call.kwargs)
            success, grad_norm = not self.result[1], self.result[5]
        finally:
            step.end(success=success, grad_norm=grad_norm)
        assert step.outcome is not None
        return step.outcome
