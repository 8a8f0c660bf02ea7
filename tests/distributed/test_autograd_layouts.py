"""Steps in every layout against plain autograd in fp64, one trajectory after the other: no layout is its own judge."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.oracle.estimator import TABLE
from tests.oracle.step_cases import CASES, EMPTY, MASKED, SPOILT_CASES, TRUNCATED, expected_steps
from tests.oracle.torchrun import torchrun

_WORKER = Path(__file__).with_name("autograd_worker.py")
_LAYOUTS = {
    "one process": 1,
    "tensor parallel": 2,
    "sequence parallel": 2,
    "pipeline parallel": 2,
    "expert parallel": 2,
    "context parallel": 2,
    "data parallel": 2,
    "all at once": 4,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Every case's minibatch and expected step, of the dense model and of that with experts; as a file and as it is."""
    steps = {moe: expected_steps(moe=moe) for moe in (False, True)}
    path = tmp_path_factory.mktemp("autograd") / "reference.pt"
    torch.save(steps, path)
    return path, steps


@pytest.mark.slow
def test_the_cases_are_worth_comparing(reference):
    """Every value of every setting occurs; bounds bite and gradients are clipped in some cases and not in others; no
    rounding moves a ratio over a bound; and what is spoilt, and nothing else, is left out."""
    configs = [case.config for case in CASES]
    assert {c.correction for c in configs} == set(TABLE)
    assert {c.baseline for c in configs} == {"none", "mean", "leave-one-out", "opob", "opob-leave-one-out"}
    assert {(c.energy, c.energy_method) for c in configs if c.energy == "exact"} == {
        ("exact", method) for method in ("two-pass", "deferred", "accumulators")
    }
    assert {(c.kl_estimator, c.kl_coefficient > 0.0) for c in configs} >= {(f"k{i}", True) for i in (1, 2, 3)}
    assert len({c.aggregation for c in configs}) == 4
    for steps in reference[1].values():
        for case in CASES:
            minibatch, step = steps[case.name]
            assert len(step.usable) == len(minibatch) - len(case.spoilt), case.name
            assert step.margin > 1e-4, case.name
        bounded = [s.metrics["weight_clipped"] for _, s in steps.values() if not s.skipped]
        assert min(bounded) == 0.0
        assert max(bounded) > 0.5
        clipped = [case.clip < steps[case.name][1].metrics.get("grad_norm", 0.0) for case in CASES]
        assert 0.2 < sum(clipped) / len(clipped) < 0.8
        minibatch, step = steps["the defaults, packed whole"]
        assert len(minibatch[EMPTY].response_ids) == 0
        assert not minibatch[MASKED].response_mask.any()
        assert math.isnan(minibatch[MASKED].behavior_logprobs.sum())
        assert minibatch[TRUNCATED].truncated
        assert {EMPTY, MASKED, TRUNCATED} <= set(step.usable)
    assert sum(steps[case.name][1].skipped for case in SPOILT_CASES) == 1


@pytest.mark.parametrize("name", _LAYOUTS)
@pytest.mark.distributed
def test_every_number_of_a_step_is_what_autograd_says(reference, name):
    torchrun(_WORKER, str(reference[0]), name, processes=_LAYOUTS[name], timeout=1500.0)
