"""What the flow asks of an engine: `Generator`. What weights are published to is sync's `WeightReceiver`."""

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
    """How one batch of responses is drawn."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    stop: tuple[str, ...] = ()  # kept in the response; special tokens count by their text
    stop_token_ids: tuple[int, ...] = ()  # kept in the response


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to be drawn. The seed alone decides it, whatever else is in the batch."""

    prompt_ids: Sequence[int]  # [P]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One drawn response."""

    response_ids: Int32Array  # [L]
    logprobs: Float32Array  # [L] of the distribution that was really sampled from
    versions: Int32Array  # [L] policy version of the weights that sampled the token
    text: str  # with the text of special tokens
    truncated: bool
    routed_experts: RouteArray | None = None  # [P + L, layers with experts, k], where the engine was asked for them


class Generator(Protocol):
    """Draws responses. One request in, one result out; a result says of each token which weights sampled it.

    Where it shares processes with the trainer, every method is called on all ranks of the engine together, in the same
    order, and leaves the trainer's RNG, thread count and default dtype as they were.
    """

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, progress: bool
    ) -> list[GenerationResult]:
        """Draw one response per request, in the order of the requests.

        Raises:
            EngineError: it has no complete set of weights, or failed.
        """

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[Float32Array]:
        """Log-probs at temperature 1 of each sequence's tokens from prompt_lengths[i] on, [len - prompt_length]
        each."""

    def shutdown(self) -> None:
        """Release memory and processes; safe to call twice."""


class RolloutEngine(Generator, WeightReceiver, Protocol):
    """Both in one: a rollout engine generates with the weights it was sent last."""


class EngineSettings(Protocol):
    """What an engine can be built from, also in another process: it pickles."""

    @property
    def log_file(self) -> str | None:
        """Where the engine writes what it says when it fails."""

    def build(self) -> RolloutEngine:
        """The engine, in this process. Raises EngineError when it cannot start."""
