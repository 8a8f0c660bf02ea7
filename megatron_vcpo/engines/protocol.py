"""`Generator`: what the flow needs of an engine. For weights, an engine is a `WeightReceiver` (sync/receiver.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_vcpo.data.routes import RouteArray
from megatron_vcpo.data.trajectory import Float32Array, Int32Array
from megatron_vcpo.sync.receiver import WeightReceiver


class EngineError(RuntimeError):
    """The engine could not start, generate or take weights; the message says what, where and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one batch of responses."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    stop: tuple[str, ...] = ()  # kept in the response; special tokens count by their text
    stop_token_ids: tuple[int, ...] = ()  # kept in the response


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to sample. It depends on the seed only, not on what else is in the batch."""

    prompt_ids: Sequence[int]  # [P]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One sampled response of L tokens, to a prompt of P tokens."""

    response_ids: Int32Array  # [L]
    logprobs: Float32Array  # [L] under the distribution that was actually sampled from
    versions: Int32Array  # [L] policy version of the weights that sampled the token
    text: str  # including the text of special tokens
    truncated: bool
    routed_experts: RouteArray | None = None  # [P + L, layers with experts, k], if asked for


class Generator(Protocol):
    """Samples responses, one result for each request; a result gives the version of the weights that sampled each
    token.

    If it shares processes with the trainer, all ranks of the engine call every method, in the same order. Methods leave
    the trainer's RNG, thread count and default dtype unchanged.
    """

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, progress: bool
    ) -> list[GenerationResult]:
        """Sample one response per request, in the order of the requests.

        Raises:
            EngineError: it has no complete set of weights, or failed.
        """

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[Float32Array]:
        """Log-probs at temperature 1 of each sequence's tokens from index prompt_lengths[i] on, [len - prompt_length]
        each."""

    def shutdown(self) -> None:
        """Release memory and processes; safe to call twice."""


class RolloutEngine(Generator, WeightReceiver, Protocol):
    """A rollout engine: generates with the weights it was last sent."""


class EngineSettings(Protocol):
    """What an engine is built from; picklable, so that it can be built in another process."""

    @property
    def log_file(self) -> str | None:
        """File for what the engine logs when it fails; None for a temporary one."""

    def build(self) -> RolloutEngine:
        """Build the engine in this process. Raises EngineError if it cannot start."""
