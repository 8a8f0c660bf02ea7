"""SupervisedFlow: the environment's answers in place of rollouts, with the same seams, packing and checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from megatron_vcpo.config import ConfigError, PluginConfig
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.environments.protocol import draw_prompt, require_unicode
from megatron_vcpo.flow.base import BaseFlow, StepBatch
from megatron_vcpo.mcore.step.policy_step import PolicyStep
from megatron_vcpo.objective import LossInputs, LossOutputs
from megatron_vcpo.rollout.inputs import Inputs

_KEPT = ("iteration", "train_iters", "version", "loss", "lr", "grad_norm", "skipped", "response_length")


def supervised_loss(inputs: LossInputs) -> LossOutputs:
    """Mean negative log-likelihood of the answers' tokens, over the whole minibatch."""
    logprobs = torch.where(inputs.mask, inputs.policy_logprobs, 0.0)
    loss = -logprobs.sum() / inputs.num_tokens
    count = inputs.mask.sum().double()
    return LossOutputs(loss=loss, metrics={"pg_loss": torch.stack([-logprobs.detach().double().sum(), count])})


class SupervisedFlow(BaseFlow):
    """Feeds a step with answers of the environment, in order; a resumed run goes on where the saved one stood."""

    def __init__(self, args: argparse.Namespace, config: PluginConfig, inputs: Inputs) -> None:
        super().__init__(args, config, inputs)
        self._next = 0
        self._retries = 0  # of the answers that come next
        self._count = config.rollout.prompts_per_step * config.rollout.responses_per_prompt

    def next_minibatch(self, *, model: list[Any], step: PolicyStep, forward_backward: Any) -> StepBatch:
        """The next answers, the same on every rank."""
        trajectories = [self._example(self._next + i) for i in range(self._count)]
        self._next += self._count
        retries, self._retries = self._retries, 0
        return StepBatch(trajectories=trajectories, retries=retries)

    def put_back(self, batch: StepBatch) -> None:
        """Let the cursor stand where it stood."""
        self._next -= self._count
        self._retries = batch.retries + 1

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

    def _record(self, metrics: dict[str, float], batch: StepBatch) -> dict[str, float]:
        record = super()._record(metrics, batch)
        # An imitated answer was not sampled: rewards, weights and ages mean nothing.
        return {name: value for name, value in record.items() if name in _KEPT or name.startswith(("time/", "count/"))}

    def state_dict(self) -> dict[str, Any]:
        """Where the answers stand."""
        return {**super().state_dict(), "next": self._next, "retries": self._retries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self._next = int(state["next"])
        self._retries = int(state.get("retries", 0))  # a checkpoint of version 0.1 has none
