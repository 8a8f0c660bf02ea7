"""EssParamScheduler over a plain object with param_groups: the base schedule must never see the multiplier."""

import math
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vcpo.patches import megatron_cpu

megatron_cpu.install()

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

from megatron_vcpo.config import VCPOConfig  # noqa: E402
from megatron_vcpo.optim import EssParamScheduler, EssSettings  # noqa: E402


def make(cls=EssParamScheduler, *, length=64, style="cosine", **kwargs):
    optimizer = types.SimpleNamespace(param_groups=[{}, {"max_lr": 2.0, "min_lr": 0.2}])
    return cls(
        optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=8,
        lr_decay_steps=length,
        lr_decay_style=style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=length,
        wd_incr_style="constant",
        **kwargs,
    )


def rates(scheduler):
    return [group["lr"] for group in scheduler.optimizer.param_groups]


@given(rhos=st.lists(st.one_of(st.floats(0, 1), st.just(math.nan), st.just(math.inf)), max_size=30))
def test_the_base_schedule_is_the_stock_one_whatever_rho_does(rhos):
    ours, stock = make(), make(OptimizerParamScheduler)
    for rho in rhos:
        ours.apply(rho)
        assert all(mine <= base + 1e-12 for mine, base in zip(rates(ours), rates(stock)))
        ours.step(4)
        stock.step(4)
        assert rates(ours) == rates(stock)


def test_apply_scales_every_group_by_the_square_root_of_rho_over_the_reference():
    scheduler = make(ess=EssSettings(reference=0.8))
    scheduler.step(16)
    base = rates(scheduler)
    assert scheduler.apply(0.2) == pytest.approx(0.5)
    assert rates(scheduler) == pytest.approx([0.5 * lr for lr in base])
    assert scheduler.apply(0.8) == 1.0
    assert scheduler.apply(1.0) == 1.0  # never above the schedule


def test_applying_twice_does_not_multiply_twice():
    scheduler = make()
    scheduler.step(16)
    scheduler.apply(0.25)
    once = rates(scheduler)
    scheduler.apply(0.25)
    assert rates(scheduler) == once


@pytest.mark.parametrize("rho", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_bad_rho_is_the_floor_step(rho):
    scheduler = make(ess=EssSettings(exponent=1.0, floor=0.05))
    scheduler.step(16)
    assert scheduler.apply(rho) == pytest.approx(0.05)


@pytest.mark.parametrize("reference", [1.0, None])
def test_restore_after_a_skipped_step_leaves_no_trace(reference):
    scheduler = make(ess=EssSettings(reference=reference))
    scheduler.apply(0.9)  # an automatic reference scales nothing before it has seen a step
    scheduler.step(16)
    base, state = rates(scheduler), scheduler.state_dict()
    assert scheduler.apply(0.3) < 0.6
    assert rates(scheduler) != base
    scheduler.restore()
    assert scheduler.multiplier == 1.0
    assert rates(scheduler) == base
    assert scheduler.state_dict() == state
    scheduler.step(4)  # nothing is left of it to be observed
    assert scheduler.state_dict()["ess"] == state["ess"]


def test_linear_and_off_scaling_follow_the_flag():
    linear = make(ess=EssSettings.of(VCPOConfig(ess_scaling="linear", ess_reference="0.5")))
    assert linear.apply(0.1) == pytest.approx(0.2)
    off = make(ess=EssSettings.of(VCPOConfig(ess_scaling="off")))
    assert off.apply(0.01) == 1.0
    assert off.apply(math.nan) == 1.0


def test_automatic_reference_is_the_median_at_the_lowest_lag():
    scheduler = make(ess=EssSettings(reference=None, reference_steps=3))
    for rho, lag in ((0.2, 2.0), (0.6, 0.0), (0.1, 1.0), (0.8, 0.0), (0.05, 2.0), (0.7, 0.0), (0.9, 0.0)):
        scheduler.apply(rho, lag)
        scheduler.step(1)
    assert scheduler.reference == pytest.approx(0.7)  # of 0.6, 0.8, 0.7; 0.9 came after it was settled


def test_the_first_step_of_an_automatic_reference_is_a_full_one_and_bad_rho_is_never_observed():
    scheduler = make(ess=EssSettings(reference=None, reference_steps=4))
    assert scheduler.apply(0.4) == 1.0
    scheduler.step(1)
    for bad in (math.nan, 0.0, math.inf):
        scheduler.apply(bad)
        scheduler.step(1)
    assert scheduler.reference == 0.4


def test_state_round_trips_and_a_stock_checkpoint_loads():
    scheduler = make(ess=EssSettings(reference=None, reference_steps=8))
    for rho in (0.4, 0.6, 0.5):
        scheduler.apply(rho)
        scheduler.step(4)
    other = make(ess=EssSettings(reference=None, reference_steps=8))
    other.load_state_dict(scheduler.state_dict())
    assert other.reference == 0.5
    assert other.num_steps == 12
    assert rates(other) == rates(scheduler)
    stock = make(OptimizerParamScheduler)
    stock.step(12)
    third = make(ess=EssSettings(reference=None))
    third.load_state_dict(stock.state_dict())
    assert math.isnan(third.reference)
    assert rates(third) == rates(stock)


def test_a_longer_run_resumes_a_constant_schedule_but_no_other_one():
    saved = make(length=64, style="constant")
    saved.step(12)
    longer = make(length=128, style="constant", use_checkpoint_opt_param_scheduler=False)
    longer.load_state_dict(saved.state_dict())
    assert longer.num_steps == 12
    assert longer.lr_decay_steps == 128
    saved = make(length=64)
    with pytest.raises(AssertionError, match="do not match"):
        make(length=128, use_checkpoint_opt_param_scheduler=False).load_state_dict(saved.state_dict())
