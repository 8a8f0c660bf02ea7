"""The log-prob probe, on arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.verify import compare_logprobs, default_tolerance
from tests.oracle.logit_probe import logit_probe


def arrays(*values: list[float]) -> list[Any]:
    return [np.array(v, np.float32) for v in values]


def test_mean_and_maximum_are_over_all_tokens_together() -> None:
    result = compare_logprobs(arrays([-1.0, -2.0, -3.0], [-4.0]), arrays([-1.0, -2.0, -3.5], [-4.25]), tolerance=1.0)
    assert (result.mean, result.max, result.tokens) == (0.1875, 0.5, 4)


@pytest.mark.parametrize(
    ("dtype", "passes", "fails"),
    [(torch.float32, 9e-4, 2e-3), (torch.float16, 0.015, 0.03), (torch.bfloat16, 0.09, 0.2)],
)
def test_default_tolerances_follow_the_type(dtype: torch.dtype, passes: float, fails: float) -> None:
    compare_logprobs(arrays([0.0, 0.0]), arrays([-passes, -passes]), tolerance=default_tolerance(dtype))
    with pytest.raises(SyncError, match=r"version 7 .*over 2 tokens"):
        compare_logprobs(arrays([0.0, 0.0]), arrays([-fails, -fails]), tolerance=default_tolerance(dtype), version=7)


def test_the_reason_tells_another_model_from_rounding() -> None:
    with pytest.raises(SyncError, match="another model"):
        compare_logprobs(arrays([-1.0]), arrays([-3.0]), tolerance=default_tolerance(torch.bfloat16))
    with pytest.raises(SyncError, match="Rounding may explain"):
        compare_logprobs(arrays([-1.0]), arrays([-1.2]), tolerance=default_tolerance(torch.bfloat16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_fail_whatever_the_tolerance(bad: float) -> None:
    for ours, theirs in ((bad, -1.0), (-1.0, bad), (bad, bad)):
        with np.errstate(invalid="ignore"), pytest.raises(SyncError, match="not finite"):
            compare_logprobs(arrays([ours]), arrays([theirs]), tolerance=1e9)


def test_different_lengths_and_nothing_at_all_are_refused() -> None:
    with pytest.raises(SyncError, match="different tokens"):
        compare_logprobs(arrays([0.0, 0.0]), arrays([0.0]), tolerance=default_tolerance(torch.float32))
    with pytest.raises(SyncError, match="or none"):
        compare_logprobs(arrays([]), arrays([]), tolerance=default_tolerance(torch.float32))


def test_the_probe_asks_both_sides_about_the_same_tokens() -> None:
    asked = []

    def score(sequences: Any, prompt_lengths: Any) -> list[Any]:
        asked.append((sequences, prompt_lengths))
        return arrays([-1.0, -1.5])

    engine: Any = SimpleNamespace(score=score, version=3)
    assert logit_probe(engine, score, [[1, 2, 3]], [1], dtype=torch.float32).mean == 0.0
    assert asked == [([[1, 2, 3]], [1])] * 2
