"""What replay is worth, measured: against the log-probs themselves, on the real Megatron-Core."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.flow.routes import mismatch_with_and_without, with_trainer_routes
from tests.mcore.test_policy_step import register
from tests.mcore.test_router_replay import EXPERTS, MOE, routed
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import build_tiny_gpt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def groups():
    with single_process_megatron() as collection:
        yield collection


@pytest.fixture
def call(groups):
    """Keyword arguments of both functions: a step that replays, and what its passes need."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tiny = build_tiny_gpt(groups, size=MOE, init_method_std=0.3)
    step = register(tiny, VCPOConfig(tokens_per_micro_batch=48), router_replay=True)
    return {"step": step, "model": tiny.model, "forward_backward": get_forward_backward_func(), "device": CPU}


def scores(call, batch):
    return call["step"].logprobs_of(batch, model=call["model"], forward_backward=call["forward_backward"])


def test_mismatch_is_that_of_the_log_probs_with_and_without_the_routes(call):
    batch = routed()
    forced = scores(call, batch)
    own = scores(call, [dataclasses.replace(t, routed_experts=None) for t in batch])
    # As an engine that was served by these experts would have given them, but for a shift of 0.01.
    made = [
        dataclasses.replace(
            t,
            behavior_logprobs=forced[i] + np.float32(0.01),
            response_mask=np.arange(len(t.response_ids)) % 3 > 0,
        )
        for i, t in enumerate(batch)
    ]
    metrics = mismatch_with_and_without(made, **call)
    d = np.concatenate([(own[i].astype(float) - t.behavior_logprobs)[t.response_mask] for i, t in enumerate(made)])
    assert metrics["mismatch_abs_replay"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["mismatch_kl_replay"] == pytest.approx(np.exp(-0.01) - 1 + 0.01, rel=1e-2)
    assert metrics["mismatch_abs_no_replay"] == pytest.approx(np.abs(d).mean(), rel=1e-6)
    assert metrics["mismatch_kl_no_replay"] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-6)
    assert metrics["mismatch_abs_no_replay"] > 0.05
    assert mismatch_with_and_without([], **call) == {}


def test_the_trainers_own_routes_replace_those_that_came(call):
    batch = routed()
    (first, second) = with_trainer_routes([batch[:3], batch[3:]], num_experts=EXPERTS, **call)
    assert [(t.group_id, t.index) for t in first + second] == [(t.group_id, t.index) for t in batch]
    own = scores(call, [dataclasses.replace(t, routed_experts=None) for t in batch])
    replayed = scores(call, first + second)
    for i, t in enumerate(first + second):
        np.testing.assert_array_equal(own[i], replayed[i])
        assert (t.routed_experts != 255).all()
        assert not np.array_equal(t.routed_experts, batch[i].routed_experts)
    assert with_trainer_routes([[], []], num_experts=EXPERTS, **call) == [[], []]
