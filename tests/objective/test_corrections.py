"""Each correction's weights against the oracle, at its bounds and far outside."""

import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from megatron_vcpo.config import CorrectionName, VCPOConfig
from megatron_vcpo.objective import (
    CORRECTIONS,
    LogRatios,
    applied_weights,
    clip_surrogate,
    log_bounds,
    log_ratios,
    segment_ids,
    sequence_log_applied,
    vetoed,
)
from tests.oracle.estimator import TABLE, Settings, bounds, is_vetoed, token_weights
from tests.oracle.minibatches import config_of, pack, per_trajectory, random_samples

NAMES = sorted(CORRECTIONS)


def ratios_of(inputs):
    return log_ratios(inputs.policy_logprobs, inputs.behavior_logprobs, inputs.mask, inputs.cu_seqlens)


def test_table_configuration_oracle_and_docs_name_the_same_corrections():
    assert set(CORRECTIONS) == set(get_args(CorrectionName)) == set(TABLE)
    table = (Path(__file__).parents[2] / "docs" / "corrections.md").read_text()
    assert all(f"`{name}`" in table for name in CORRECTIONS)


@pytest.mark.parametrize("name", NAMES)
def test_default_bounds_are_the_documented_ones(name):
    low, high = (math.exp(b) for b in log_bounds(VCPOConfig(correction=name)))
    expected_low, expected_high = bounds(Settings(correction=name))
    assert low == pytest.approx(expected_low)
    assert high == pytest.approx(min(expected_high, math.exp(20)))


@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.5, 2.0])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limits", [(None, None), (0.7, 1.6)])
def test_weights_equal_the_oracle(name, spread, limits):
    settings = Settings(correction=name, lower=limits[0], upper=limits[1])
    samples = random_samples(3, groups=8, spread=spread)
    inputs = pack(samples, settings)
    weights = applied_weights(ratios_of(inputs), config_of(settings)).log_weights.exp()
    expected = [token_weights(s, settings) for s in samples]
    if CORRECTIONS[name].level == "token":
        for ours, theirs in zip(per_trajectory(weights, inputs), expected):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    else:
        for ours, theirs in zip(weights.tolist(), expected):
            np.testing.assert_allclose(np.full(len(theirs), ours), theirs, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_sequence_weights_from_log_weights_alone_are_the_same_ones(name):
    settings = Settings(correction=name)
    samples = random_samples(4, groups=8, spread=1.0)
    inputs = pack(samples, settings)
    ratios = ratios_of(inputs)
    lengths = torch.tensor([s.length for s in samples])
    result = sequence_log_applied(ratios.sequence, lengths, config_of(settings))
    if CORRECTIONS[name].level == "token":
        assert result.tolist() == [0.0] * len(samples)
    else:
        assert torch.equal(result, applied_weights(ratios, config_of(settings)).log_weights)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_one_and_nothing_is_altered_on_policy(name):
    inputs = pack(random_samples(5, spread=0.0), Settings())
    weights = applied_weights(ratios_of(inputs), VCPOConfig(correction=name))
    assert weights.log_weights.abs().max() == 0.0
    assert not weights.altered.any()


@pytest.mark.parametrize("value", [1e4, -1e4, 700.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("upper", [None, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_log_ratios_give_finite_weights_and_bad_ones_none(name, upper, value):
    value = torch.tensor([value, 0.0], dtype=torch.float64)
    config = VCPOConfig(correction=name, correction_upper=upper)
    weights = applied_weights(LogRatios(token=value, sequence=value, mean=value), config)
    applied = weights.log_weights.exp()
    assert torch.isfinite(applied).all()
    assert (applied <= math.exp(20.0) * (1 + 1e-12)).all()
    if not torch.isfinite(value[0]):
        assert applied[0] == 0.0
        assert weights.altered[0]


@pytest.mark.parametrize("name", ["token-mis", "sequence-mis", "geometric-mis", "icepop"])
def test_bounds_of_masks_are_inclusive_and_outside_is_dropped_not_truncated(name):
    config = VCPOConfig(correction=name, correction_lower=0.5, correction_upper=2.0)
    value = torch.tensor([0.5, 2.0, 0.499, 2.001], dtype=torch.float64).log()
    value[:2] = torch.tensor([math.log(0.5), math.log(2.0)], dtype=torch.float64)
    weights = applied_weights(LogRatios(token=value, sequence=value, mean=value), config)
    assert weights.log_weights.exp().tolist() == [0.5, 2.0, 0.0, 0.0]
    assert weights.altered.tolist() == [False, False, True, True]


def test_truncation_never_raises_small_weights_and_reports_only_the_cut_ones():
    value = torch.tensor([-1e4, 1.0, 1e4], dtype=torch.float64)
    weights = applied_weights(LogRatios(token=value, sequence=value, mean=value), VCPOConfig(correction_lower=0.5))
    np.testing.assert_allclose(weights.log_weights, [-1e4, 1.0, math.log(8.0)])
    assert weights.altered.tolist() == [False, False, True]


def test_clipping_reports_both_sides():
    value = torch.tensor([-1e4, 0.1, 1e4], dtype=torch.float64)
    weights = applied_weights(LogRatios(token=value, sequence=value, mean=value), VCPOConfig(correction="ppo-clip"))
    assert weights.altered.tolist() == [True, False, True]
    np.testing.assert_allclose(weights.log_weights.exp(), [0.8, math.exp(0.1), 1.28])


def test_an_upper_bound_of_zero_drops_everything_without_an_error():
    value = torch.zeros(2, dtype=torch.float64)
    weights = applied_weights(LogRatios(token=value, sequence=value, mean=value), VCPOConfig(correction_upper=0.0))
    assert weights.log_weights.exp().tolist() == [0.0, 0.0]


def test_weights_carry_no_gradient():
    inputs = pack(random_samples(6), Settings())
    for name in NAMES:
        assert not applied_weights(ratios_of(inputs), VCPOConfig(correction=name)).log_weights.requires_grad


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.8])
def test_veto_finds_trajectories_with_one_token_below_the_ratio(ratio):
    settings = Settings(veto=ratio)
    samples = random_samples(7, groups=10, spread=0.8)
    inputs = pack(samples, settings)
    ids = segment_ids(inputs.cu_seqlens, inputs.mask.numel())
    expected = [is_vetoed(s, settings) for s in samples]
    assert vetoed(ratios_of(inputs), ids, config_of(settings)).tolist() == expected
    assert any(expected) == (ratio > 0.0)


@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
@pytest.mark.parametrize("log_ratio", [-1e4, -30.0, -0.5, 0.0, 0.1, 0.5, 30.0, 1e4])
def test_clip_surrogate_is_finite_and_has_a_gradient_on_the_near_side_only(log_ratio, advantage):
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    low, high = math.log(0.8), math.log(1.28)
    value = clip_surrogate(policy, torch.tensor([log_ratio]).double(), torch.tensor([advantage]).double(), low, high)
    value.sum().backward()
    bounded = max(min(log_ratio, 20.0), -700.0)
    clipped = min(max(log_ratio, low), high)
    assert value.item() == pytest.approx(min(math.exp(bounded) * advantage, math.exp(clipped) * advantage))
    far = (advantage > 0 and log_ratio > high) or (advantage < 0 and (log_ratio < low or log_ratio > 20.0))
    slope = 0.0 if far else math.exp(bounded) * advantage
    assert policy.grad.item() == pytest.approx(slope if advantage else 0.0)
