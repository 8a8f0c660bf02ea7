"""The protocol between the flow and whatever generates: `sync/` and `rollout/` meet only here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_vcpo.data.routes import RouteArray
from megatron_vcpo.data.trajectory import Float32Array, Int32Array


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
    text: str  # with the text of special tokens
    truncated: bool
    routed_experts: RouteArray | None = None  # [P + L, layers with experts, k], where the engine was asked for them


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """How one set of weights reached the engine."""

    copied: int = 0  # tensors written straight into the engine's memory
    reloaded: int = 0  # tensors that went through the engine's own loader
    received: dict[str, int] | None = None  # digest of each tensor as it arrived, of a verified update
    unreadable: tuple[str, ...] = ()  # tensors that a verified update could not read back from the engine


class RolloutEngine(Protocol):
    """Generates responses with weights of a known version.

    An engine is colocated with the trainer: every method is called on all ranks of the engine together, in the same
    order, and leaves the trainer's RNG, thread count and default dtype as they were.
    """

    version: int | None
    """Policy version of the weights it serves; None while no complete set has arrived: generate() then refuses."""

    float32_weights: frozenset[str]
    """Parameters that it holds in float32, whatever its type: they are published in float32."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, progress: bool
    ) -> list[GenerationResult]:
        """Draw one response per request, in the order of the requests."""

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[Float32Array]:
        """Log-probs at temperature 1 of each sequence's tokens from prompt_lengths[i] on, [len - prompt_length]
        each."""

    def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], version: int, *, verify: bool = False
    ) -> UpdateReport:
        """Replace all weights by the named tensors (Hugging Face names, full shapes), then reset the prefix cache once.

        With `verify` the old values are spoiled first, and what the engine then holds is compared with what came.
        The producer may reuse a tensor's memory as soon as the next one is asked for. Any error leaves `version` None.
        """

    def shutdown(self) -> None:
        """Release memory and processes; safe to call twice."""
