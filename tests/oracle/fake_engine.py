"""An engine and a reward pool without a model: what they return is a function of their input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_vcpo.engines.protocol import GenerationRequest, GenerationResult, Sampling
from megatron_vcpo.environments import Environment, Prompt
from megatron_vcpo.rollout.rewards.outcome import RewardOutcome
from tests.oracle.tiny_models import EOS


class FakeEngine:
    """Each response is drawn from its request's prompt and seed; one in eight is empty (the end of text at once)."""

    def __init__(self, version: int = 0) -> None:
        self.version: int | None = version
        self.requests: list[GenerationRequest] = []
        self.sampling: Sampling | None = None

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling, *, progress: bool) -> list:
        self.requests += requests
        self.sampling = sampling
        return [self._respond(request, sampling) for request in requests]

    def _respond(self, request: GenerationRequest, sampling: Sampling) -> GenerationResult:
        random = np.random.default_rng([request.seed, *request.prompt_ids])
        length = 0 if request.seed % 8 == 0 else int(random.integers(1, 2 * sampling.max_tokens))
        truncated = length >= sampling.max_tokens
        ids = random.integers(3, 99, min(length, sampling.max_tokens)).astype(np.int32)
        if not truncated:
            ids = np.append(ids, np.int32(EOS))
        return GenerationResult(
            response_ids=ids,
            logprobs=-random.random(len(ids)).astype(np.float32),
            versions=np.full(len(ids), self.version, np.int32),
            text="",
            truncated=truncated,
        )


class InlineRewards:
    """Judges in this process; a response that ends in one of `rejected` gets no reward, of the given kind."""

    def __init__(self, environment: Environment, rejected: dict[str, str] | None = None) -> None:
        self.environment = environment
        self.rejected = rejected or {}
        self.judged: list[tuple[Prompt, str]] = []

    def judge(self, items: Sequence[tuple[Prompt, str]]) -> list[RewardOutcome]:
        self.judged += items
        return [self._judge(prompt, response) for prompt, response in items]

    def _judge(self, prompt: Prompt, response: str) -> RewardOutcome:
        kind = self.rejected.get(response[-1:])
        if kind is not None:
            return RewardOutcome(reward=None, kind=kind, error="it could not be judged")
        return RewardOutcome(reward=self.environment.reward(prompt, response), parts={"length": float(len(response))})


class CountedCharacters:
    """A finite or endless task: prompt i is the number i, the reward the number of characters of the response."""

    def __init__(self, size: int | None = None, long: frozenset[int] = frozenset()) -> None:
        self.long = long
        if size is not None:
            self.size = size
            self.__class__ = _FiniteCharacters

    def prompt(self, index: int) -> Prompt:
        return Prompt(text=f"{index}:" + "x" * (1000 if index in self.long else 0), answer=index)

    def reward(self, prompt: Prompt, response: str) -> float:
        return float(len(response))


class _FiniteCharacters(CountedCharacters):
    def __len__(self) -> int:
        return self.size
