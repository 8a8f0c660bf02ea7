"""Frozen routers and expert biases on the real Megatron-Core."""

from __future__ import annotations

import pytest
import torch

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.mcore.routers.state import ExpertBiases, freeze_routers
from tests.mcore.test_policy_step import make_trajectories, register, run_step
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import Size, build_tiny_gpt

BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}


@pytest.fixture(scope="module")
def groups():
    with single_process_megatron() as collection:
        yield collection


def step_of(groups, *, before_wrap=lambda chunks: None, broken=False, **fields):
    """Names of the parameters that one step moved, and the first layer's expert bias before and after."""
    tiny = build_tiny_gpt(groups, size=Size(experts=4), before_wrap=before_wrap, **fields)
    vcpo = register(tiny, VCPOConfig())
    named = dict(tiny.model[0].module.named_parameters())
    before = {name: value.detach().clone() for name, value in named.items()}
    router = tiny.model[0].module.decoder.layers[0].mlp.router
    bias = None if router.expert_bias is None else router.expert_bias.clone()
    if broken:
        vcpo.guard = lambda _step: (False, None, None)
    metrics, _ = run_step(tiny, vcpo, make_trajectories())
    assert metrics["skipped"] == float(broken)
    moved = {name for name, value in named.items() if not torch.equal(value, before[name])}
    return moved, set(named), bias, router.expert_bias


def test_a_frozen_router_stays_while_everything_else_moves(groups):
    moved, names, _, _ = step_of(groups, before_wrap=lambda c: freeze_routers(c, weights=True, expert_bias=False))
    routers = {name for name in names if ".router." in name}
    assert len(routers) == 2
    assert moved == names - routers
    moved, names, _, _ = step_of(groups)
    assert moved == names


@pytest.mark.parametrize("frozen", [False, True])
def test_load_balancing_moves_the_expert_bias_unless_it_is_frozen(groups, frozen):
    def freeze(chunks):
        if frozen:
            assert freeze_routers(chunks, weights=False, expert_bias=True) == 2

    moved, names, before, after = step_of(groups, before_wrap=freeze, **BIASED)
    assert torch.equal(before, after) == frozen
    assert moved == names


def test_a_step_that_was_not_made_leaves_the_expert_bias_as_it_was(groups):
    moved, _, before, after = step_of(groups, broken=True, **BIASED)
    assert moved == set()
    assert torch.equal(before, after)


def test_biases_that_are_not_there_cannot_be_frozen_and_cost_nothing(groups):
    tiny = build_tiny_gpt(groups, size=Size(experts=4))
    with pytest.raises(ConfigError, match="--moe-router-enable-expert-bias"):
        freeze_routers(tiny.model, weights=False, expert_bias=True)
    assert freeze_routers(build_tiny_gpt(groups).model, weights=True, expert_bias=True) == 0
    ExpertBiases(tiny.model).restore()
