"""Check whether the engine computes the same log-probs as the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_vcpo.data.trajectory import Float32Array
from megatron_vcpo.sync.errors import SyncError

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest mean absolute difference, in nats, that different kernels of the same dtype explain."""

_QUANTIZED_TOLERANCE = 0.3
"""The same for an 8-bit engine; small models had up to 0.1."""

_FAR = 0.5  # mean difference in nats above which rounding cannot be the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Absolute differences between trainer's and engine's log-probs, in nats."""

    mean: float
    max: float
    tokens: int


def default_tolerance(dtype: torch.dtype, *, quantized: bool = False) -> float:
    """Largest mean absolute difference, in nats, that an engine's dtype alone can explain."""
    return _QUANTIZED_TOLERANCE if quantized else _TOLERANCES[dtype]


def compare_logprobs(
    trainer: Sequence[Float32Array],
    engine: Sequence[Float32Array],
    *,
    tolerance: float,
    version: int | None = None,
) -> ProbeResult:
    """Compare the engine's log-probs with the trainer's on the same tokens.

    Args:
        trainer: one array [L_i] for each sequence.
        engine: the same from the engine, whose weights were just published.
        tolerance: largest allowed mean absolute difference, in nats.
        version: of the published weights, for the message.

    Raises:
        SyncError: the mean is above the tolerance, or a log-prob is not finite. The message gives mean and tolerance.
    """
    lengths = ([len(x) for x in trainer], [len(x) for x in engine])
    if lengths[0] != lengths[1] or not sum(lengths[0]):
        raise SyncError(f"Trainer and engine scored different tokens, or none: {lengths[0]} against {lengths[1]}.")
    difference = np.abs(np.concatenate(list(trainer)).astype(np.float64) - np.concatenate(list(engine)))
    result = ProbeResult(mean=float(difference.mean()), max=float(difference.max()), tokens=difference.size)
    # `not <=`, so that NaN fails too
    if not result.mean <= tolerance:
        raise SyncError(
            f"After publishing version {version} the engine's log-probs differ from the trainer's by "
            f"{result.mean:.3g} nats on average and {result.max:.3g} at most over {result.tokens} tokens "
            f"(tolerance {tolerance:g}). {_reason(result)}"
        )
    return result


def _reason(result: ProbeResult) -> str:
    if not np.isfinite(result.mean):
        return "A log-prob is not finite: look at the weights, and at the type's range (--rollout-engine-dtype)."
    if result.mean > _FAR:
        return (
            "That is another model: weights that did not arrive, or settings that config.json and Megatron's flags do "
            "not share (rope base, tied embeddings, norm epsilon, query groups)."
        )
    return (
        "Rounding may explain it: compare in --rollout-engine-dtype float32, or raise --sync-verify-tolerance; "
        "with experts, routing flips in bfloat16."
    )
