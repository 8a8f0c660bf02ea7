"""RolloutCollector: one rollout phase, from prompts to judged trajectories on every rank."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_vcpo.config import RolloutConfig
from megatron_vcpo.data.exchange import exchange_trajectories
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.engines.protocol import GenerationRequest, GenerationResult, Generator
from megatron_vcpo.environments.protocol import Prompt
from megatron_vcpo.rollout.decode import ResponseDecoder
from megatron_vcpo.rollout.rewards.outcome import KINDS, RewardOutcome
from megatron_vcpo.rollout.rewards.pool import RewardPool
from megatron_vcpo.rollout.sampler import DrawnPrompt, PromptSampler
from megatron_vcpo.rollout.stopping import sampling
from megatron_vcpo.runtime import phases
from megatron_vcpo.runtime.agreement import raise_together

logger = logging.getLogger(__name__)

_SHOWN_ERRORS = 3  # rejected rewards to explain per phase and rank (or one of each kind, if there are more kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """The engine that this process belongs to."""

    index: int = 0
    count: int = 1
    leader: bool = True  # hands over the engine's responses; its other ranks only help to compute them

    @staticmethod
    def of(rank: int, world_size: int, engine_size: int) -> EnginePlace:
        """The place of a rank, where each engine consists of `engine_size` consecutive ranks."""
        return EnginePlace(index=rank // engine_size, count=world_size // engine_size, leader=rank % engine_size == 0)

    def share(self, items: Sequence[Any]) -> list[Any]:
        """This engine's contiguous part of a list that all ranks hold."""
        bounds = np.linspace(0, len(items), self.count + 1).round().astype(int)
        return list(items[bounds[self.index] : bounds[self.index + 1]])


@dataclass(slots=True, kw_only=True)
class Responses:
    """What this rank's engine sampled in one rollout phase, before it is judged."""

    steps: int  # number of optimizer steps that the phase feeds
    prompts: list[DrawnPrompt]  # of all engines
    samples: list[tuple[DrawnPrompt, int]]  # this engine's: prompt, and number of the response to it
    results: list[GenerationResult]  # in the order of the samples; empty after a failure
    failure: Exception | None  # of this rank; judge() raises it on all ranks together
    seconds: float


@dataclass(slots=True, kw_only=True)
class RolloutPhase:
    """The result of one rollout phase, the same on every rank except for the seconds."""

    minibatches: list[list[Trajectory]]  # one for each optimizer step, in training order
    rejected: int  # number of trajectories whose reward failed
    rejected_by_kind: dict[str, int]  # the same for each of rewards/outcome.KINDS
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of all minibatches."""
        return [t for minibatch in self.minibatches for t in minibatch]


class RolloutCollector:
    """Draws prompts, generates, judges, and gives every rank the same trajectories."""

    def __init__(
        self,
        *,
        engine: Generator,
        sampler: PromptSampler,
        rewards: RewardPool | None,
        decode: ResponseDecoder,
        config: RolloutConfig,
        place: EnginePlace,
        device: torch.device,
    ) -> None:
        """Args: rewards: on an engine's leader; None on its other ranks. device: where collectives need tensors."""
        self.engine = engine
        self.sampler = sampler
        self.rewards = rewards
        self.decode = decode
        self.config = config
        self.place = place
        self.device = device

    def generate(self, steps: int) -> Responses:
        """Draw prompts for `steps` optimizer steps, and sample responses to this engine's share of them."""
        started = time.perf_counter()
        phases.enter("generate and judge", alone=True)
        prompts = self.sampler.draw(self.config.prompts_per_step * steps)
        samples = [
            (drawn, index) for drawn in self.place.share(prompts) for index in range(self.config.responses_per_prompt)
        ]
        requests = [
            GenerationRequest(prompt_ids=drawn.ids, seed=response_seed(self.sampler.seed, drawn.group_id, index))
            for drawn, index in samples
        ]
        results: list[GenerationResult] = []
        failure: Exception | None = None
        try:
            drawn_with = sampling(self.config, self.config.temperature)
            results = self.engine.generate(requests, drawn_with, progress=self._progress)
        except Exception as error:  # noqa: BLE001 - raised on all ranks together: the others wait in the exchange
            failure = error
        return Responses(
            steps=steps,
            prompts=prompts,
            samples=samples,
            results=results,
            failure=failure,
            seconds=time.perf_counter() - started,
        )

    def judge(self, responses: Responses) -> RolloutPhase:
        """Reward the responses and give every rank all trajectories; collective over all ranks."""
        started = time.perf_counter()
        local: list[Trajectory] = []
        kinds = torch.zeros(len(KINDS), dtype=torch.int64)
        failure = responses.failure
        if failure is None and self.rewards is not None:
            try:
                local, kinds = self._judge(self.rewards, responses)
            except Exception as error:  # noqa: BLE001 - raised on all ranks together: the others wait in the exchange
                failure = error
        reward_seconds = 0.0 if self.rewards is None else time.perf_counter() - started
        phases.enter("exchange trajectories")
        raise_together(failure)
        trajectories = exchange_trajectories(local, device=self.device)
        kinds = kinds.to(self.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(kinds)
        first = responses.prompts[0].group_id
        minibatches: list[list[Trajectory]] = [[] for _ in range(responses.steps)]
        for trajectory in trajectories:
            minibatches[(trajectory.group_id - first) // self.config.prompts_per_step].append(trajectory)
        expected = len(responses.prompts) * self.config.responses_per_prompt
        rejected = expected - len(trajectories)
        logger.debug(
            "rollout phase: %d prompts, %d responses (%d from this rank's engine), %d rejected; %.2f s to generate, "
            "%.2f s to judge",
            *(len(responses.prompts), expected, len(responses.samples), rejected, responses.seconds, reward_seconds),
        )
        return RolloutPhase(
            minibatches=minibatches,
            rejected=rejected,
            rejected_by_kind=dict(zip(KINDS, kinds.tolist())),
            seconds={"generate": responses.seconds, "reward": reward_seconds},
        )

    def _judge(self, rewards: RewardPool, responses: Responses) -> tuple[list[Trajectory], torch.Tensor]:
        """This engine's trajectories, and the number of failed rewards of each kind [len(KINDS)]."""
        samples, results = responses.samples, responses.results
        outcomes = judge(rewards, [drawn.prompt for drawn, _ in samples], results, self.decode)
        trajectories = [
            self._trajectory(drawn, index, result, outcome)
            for (drawn, index), result, outcome in zip(samples, results, outcomes)
            if outcome.reward is not None
        ]
        self._explain(samples, outcomes)
        return trajectories, torch.tensor([sum(outcome.kind == kind for outcome in outcomes) for kind in KINDS])

    @property
    def _progress(self) -> bool:
        first = not dist.is_initialized() or dist.get_rank() == 0
        return first and not self.config.quiet and sys.stderr.isatty()

    def _trajectory(
        self, drawn: DrawnPrompt, index: int, result: GenerationResult, outcome: RewardOutcome
    ) -> Trajectory:
        length = len(result.response_ids)
        return Trajectory(
            prompt_ids=np.array(drawn.ids, np.int32),
            response_ids=result.response_ids,
            behavior_logprobs=result.logprobs,
            versions=result.versions,
            response_mask=np.ones(length, np.bool_),
            reward=float(outcome.reward or 0.0),
            reward_parts=dict(outcome.parts),
            group_id=drawn.group_id,
            index=index,
            truncated=result.truncated,
            prompt_index=drawn.prompt_index,
            routed_experts=result.routed_experts,
        )

    def _explain(self, samples: list[tuple[DrawnPrompt, int]], outcomes: list[RewardOutcome]) -> None:
        failed = [(s, o) for s, o in zip(samples, outcomes) if o.reward is None]
        counts: Counter[str | None] = Counter()
        turns: list[int] = []  # for each failure, how many of its kind came before
        for _, outcome in failed:
            turns.append(counts[outcome.kind])
            counts[outcome.kind] += 1
        # Show one of each kind first: hundreds of one kind would hide the others.
        shown = sorted(range(len(failed)), key=turns.__getitem__)[: max(_SHOWN_ERRORS, len(counts))]
        for number in shown:
            (drawn, index), outcome = failed[number]
            logger.warning(
                f"rejected group {drawn.group_id} response {index} (prompt {drawn.prompt_index}): {outcome.error}"
            )
        if len(failed) > len(shown):
            kinds = ", ".join(f"{kind} {number}" for kind, number in counts.most_common())
            logger.warning(f"... and {len(failed) - len(shown)} more in this phase; all together: {kinds}")


def judge(
    pool: RewardPool, prompts: Sequence[Prompt], results: Sequence[GenerationResult], decode: ResponseDecoder
) -> list[RewardOutcome]:
    """Rewards of the responses, in order."""
    return pool.judge([(prompt, decode(result.response_ids.tolist())) for prompt, result in zip(prompts, results)])


def response_seed(seed: int, group_id: int, index: int) -> int:
    """Seed of one response. It depends only on the run's seed and the response's place, not on the layout."""
    return int(np.random.SeedSequence([seed, group_id, index]).generate_state(1, np.uint32)[0] >> 1)
