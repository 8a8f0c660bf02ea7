"""SupervisedLoop: trains on the environment's answers instead of rollouts, with the same step, packing and
checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from megatron_vcpo.config import ConfigError, PluginConfig
from megatron_vcpo.data.minibatch import Minibatch
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.environments.protocol import draw_prompt, require_unicode
from megatron_vcpo.flow.loop import Loop
from megatron_vcpo.flow.trainer import Trainer
from megatron_vcpo.mcore.step.outcome import StepOutcome
from megatron_vcpo.objective import LossInputs, LossOutputs
from megatron_vcpo.rollout.inputs import Inputs
from megatron_vcpo.runtime import phases

_KEPT = ("iteration", "train_iters", "version", "loss", "lr", "grad_norm", "skipped", "response_length")


def supervised_loss(inputs: LossInputs) -> LossOutputs:
    """Mean negative log-likelihood of the answers' tokens, over the whole minibatch."""
    logprobs = torch.where(inputs.mask, inputs.policy_logprobs, 0.0)
    loss = -logprobs.sum() / inputs.num_tokens
    count = inputs.mask.sum().double()
    return LossOutputs(loss=loss, metrics={"pg_loss": torch.stack([-logprobs.detach().double().sum(), count])})


class SupervisedLoop(Loop):
    """Trains on the environment's answers, in order; a resumed run continues where the saved one stopped."""

    def __init__(self, args: argparse.Namespace, config: PluginConfig, inputs: Inputs) -> None:
        super().__init__(args, config, inputs)
        self._next = 0  # index of the next answer
        self._put_back: Minibatch | None = None
        self._count = config.rollout.prompts_per_step * config.rollout.responses_per_prompt

    def iteration(self, trainer: Trainer) -> None:
        """Take the next answers, train on them, and log."""
        minibatch = self.take()
        outcome = self.train(trainer, minibatch)
        self.settle(minibatch, outcome)
        self.log(minibatch, outcome)

    def take(self) -> Minibatch:
        """The next minibatch of answers, the same on every rank."""
        phases.enter("take a minibatch")
        minibatch, self._put_back = self._put_back, None
        if minibatch is None:
            minibatch = self._answers(retries=0)
        return minibatch

    def put_back(self, minibatch: Minibatch) -> None:
        """Make the same answers the next ones again."""
        self._put_back = minibatch

    def _answers(self, *, retries: int) -> Minibatch:
        first = self._next
        self._next += self._count
        return Minibatch(trajectories=tuple(self._example(first + i) for i in range(self._count)), retries=retries)

    def _example(self, index: int) -> Trajectory:
        tokenizer = self.inputs.tokenizer
        prompt = draw_prompt(self.inputs.environment, index)
        if not isinstance(prompt.answer, str):
            raise ConfigError(
                f"--rollout-environment {self.config.rollout.environment} gives no text as an answer, "
                "so there is nothing to imitate; choose another environment for the supervised warm-up."
            )
        require_unicode(prompt.answer, f"The answer of prompt({index}) of {self.config.rollout.environment}")
        answer = [*tokenizer.encode(prompt.answer, add_special_tokens=False), tokenizer.eos_token_id]
        answer = answer[: self.config.rollout.max_response_length]
        return Trajectory(
            prompt_ids=np.array(tokenizer.encode(prompt.text), np.int32),
            response_ids=np.array(answer, np.int32),
            behavior_logprobs=np.zeros(len(answer), np.float32),
            versions=np.zeros(len(answer), np.int32),
            response_mask=np.ones(len(answer), bool),
            reward=1.0,
            group_id=index,
            index=0,
            prompt_index=index,
        )

    def record(self, minibatch: Minibatch, outcome: StepOutcome) -> dict[str, float]:
        """The metrics of the line, without rewards, weights and ages, which mean nothing for answers that were not
        sampled."""
        return {name: value for name, value in super().record(minibatch, outcome).items() if name in _KEPT}

    def state_dict(self) -> dict[str, Any]:
        """The position in the answers; those that were put back come next."""
        waiting = self._put_back
        return {
            **super().state_dict(),
            "next": self._next - (0 if waiting is None else self._count),
            "retries": 0 if waiting is None else waiting.retries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        super().load_state_dict(state)
        self._next = int(state["next"])
        retries = int(state.get("retries", 0))  # missing in checkpoints of version 0.1
        if retries:
            self._put_back = self._answers(retries=retries)
