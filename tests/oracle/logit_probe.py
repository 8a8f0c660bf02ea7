"""Does an engine score tokens as the trainer does?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_vcpo.data.trajectory import Float32Array
from megatron_vcpo.engines.protocol import RolloutEngine
from megatron_vcpo.sync.verify import ProbeResult, compare_logprobs, default_tolerance

ScoreFunction = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[Float32Array]]


def logit_probe(
    engine: RolloutEngine,
    score: ScoreFunction,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    tolerance: float | None = None,
) -> ProbeResult:
    """Compare the engine's log-probs with those of `score` on the same tokens, at temperature 1; SyncError if far."""
    theirs = engine.score(sequences, prompt_lengths)
    ours = score(sequences, prompt_lengths)
    if tolerance is None:
        tolerance = default_tolerance(dtype)
    return compare_logprobs(ours, theirs, tolerance=tolerance, version=engine.version)
