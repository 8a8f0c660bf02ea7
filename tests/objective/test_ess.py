"""Effective sample size and the learning-rate multiplier."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.objective import (
    combine_ess_statistics,
    effective_sample_size,
    ess_log_weights,
    ess_statistics,
    learning_rate_multiplier,
)
from tests.oracle import estimator

moderate = st.floats(-50, 50)
anything = st.one_of(moderate, st.sampled_from([1e4, -1e4, math.inf, -math.inf, math.nan]))


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@given(st.lists(anything, min_size=1, max_size=20))
def test_rho_equals_the_oracle(values):
    rho = effective_sample_size(tensor(values))
    assert rho.dtype == torch.float64
    assert rho.item() == pytest.approx(estimator.effective_sample_size(values), rel=1e-12)


@given(st.lists(anything, min_size=1, max_size=20))
def test_rho_lies_between_one_over_the_usable_number_and_one_or_is_zero(values):
    usable = sum(math.isfinite(v) for v in values)
    rho = effective_sample_size(tensor(values)).item()
    assert rho == 0.0 if usable == 0 else 1.0 / usable <= rho <= 1.0


@given(st.lists(moderate, min_size=1, max_size=20), st.sampled_from([-1e4, -3.0, 1e4]))
def test_a_constant_added_to_all_log_weights_changes_nothing(values, shift):
    assert effective_sample_size(tensor(values) + shift).item() == pytest.approx(
        effective_sample_size(tensor(values)).item(), rel=1e-9
    )


@pytest.mark.parametrize("value", [0.0, -1e4, 1e4, 700.0])
@pytest.mark.parametrize("count", [1, 7])
def test_equal_weights_give_exactly_one(value, count):
    assert effective_sample_size(torch.full((count,), value)).item() == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_random_nearly_equal_weights_do_not_round_above_one(seed):
    generator = torch.Generator().manual_seed(seed)
    assert effective_sample_size(1e-9 * torch.randn(7, generator=generator, dtype=torch.float64)).item() <= 1.0


def test_one_dominating_weight_gives_one_over_n():
    assert effective_sample_size(tensor([1e4, 0.0, 0.0, -1e4])).item() == 0.25


def test_excluded_trajectories_leave_the_denominator_too():
    clean = effective_sample_size(tensor([0.0, 1.0]))
    assert effective_sample_size(tensor([0.0, math.nan, 1.0, math.inf, -math.inf])) == clean


def test_no_usable_log_weight_gives_zero_and_the_floor_step():
    rho = effective_sample_size(tensor([math.nan, math.inf]))
    assert rho.item() == 0.0
    assert learning_rate_multiplier(rho) == 0.0
    assert learning_rate_multiplier(rho, floor=0.25) == 0.5


def test_an_empty_minibatch_is_refused():
    with pytest.raises(ValueError, match="empty"):
        effective_sample_size(torch.zeros(0))


@given(st.lists(st.lists(anything, max_size=6), min_size=1, max_size=6))
def test_shards_combine_to_the_rho_of_the_whole(shards):
    stats = torch.stack([ess_statistics(tensor(shard)) for shard in shards])
    assert stats.shape == (len(shards), 4)
    assert not torch.isnan(stats).any()
    whole = [value for shard in shards for value in shard]
    assert combine_ess_statistics(stats).item() == pytest.approx(estimator.effective_sample_size(whole), rel=1e-12)


def test_shards_far_apart_combine_without_overflow():
    stats = torch.stack(
        [ess_statistics(tensor([1e4, 1e4])), ess_statistics(tensor([-1e4])), ess_statistics(tensor([]))]
    )
    assert combine_ess_statistics(stats).item() == pytest.approx(2 / 3, rel=1e-12)


def test_an_empty_shard_has_the_neutral_statistics():
    assert ess_statistics(torch.zeros(0)).tolist() == [-math.inf, 0.0, 0.0, 0.0]
    assert ess_statistics(tensor([math.nan])).tolist() == [-math.inf, 0.0, 0.0, 0.0]


def test_nan_in_the_statistics_of_a_shard_never_becomes_a_full_step():
    for column in range(4):
        stats = torch.stack([ess_statistics(tensor([0.0, 1.0])), ess_statistics(tensor([0.5]))])
        stats[1, column] = math.nan
        rho = combine_ess_statistics(stats)
        assert math.isnan(rho.item())
        assert learning_rate_multiplier(rho) == 0.0


@given(st.floats(0, 1), st.floats(0.01, 1), st.sampled_from([0.5, 1.0, 2.0]), st.floats(0, 1))
def test_multiplier_equals_the_oracle(rho, reference, exponent, floor):
    result = learning_rate_multiplier(rho, reference, exponent, floor)
    assert result == pytest.approx(estimator.multiplier(rho, reference, exponent, floor), rel=1e-12)
    assert 0.0 <= result <= 1.0


def test_multiplier_defaults_are_the_square_root_against_one():
    assert learning_rate_multiplier(0.25) == 0.5
    assert learning_rate_multiplier(torch.tensor(0.25)) == 0.5
    assert learning_rate_multiplier(1.0) == 1.0
    assert isinstance(learning_rate_multiplier(torch.tensor(0.25)), float)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
@pytest.mark.parametrize("floor", [0.0, 0.3, 1.0])
def test_a_rho_that_is_not_finite_gives_the_floor_and_never_a_full_step(bad, floor):
    assert learning_rate_multiplier(bad, floor=floor) == learning_rate_multiplier(0.0, floor=floor) == floor**0.5
    assert learning_rate_multiplier(bad, floor=floor, exponent=1.0) == floor


def test_a_negative_rho_is_floored():
    assert learning_rate_multiplier(-1.0, floor=0.25) == 0.5


@pytest.mark.parametrize(
    "setting",
    [
        {"reference": 0.0},
        {"reference": -0.1},
        {"reference": math.nan},
        {"reference": math.inf},
        {"exponent": 0.0},
        {"exponent": math.nan},
        {"floor": -0.1},
        {"floor": 1.1},
        {"floor": math.nan},
    ],
)
def test_settings_that_could_release_the_brake_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        learning_rate_multiplier(0.5, **setting)


def test_capped_weights_are_capped_at_the_corrections_bound_and_bad_ones_stay_bad():
    lam = tensor([0.0, 5.0, math.inf, math.nan, -math.inf])
    capped = ess_log_weights(lam, VCPOConfig(ess_weights="capped", correction_upper=2.0))
    torch.testing.assert_close(capped, tensor([0.0, math.log(2.0), math.inf, math.nan, -math.inf]), equal_nan=True)
    assert ess_log_weights(lam, VCPOConfig())[1] == 5.0
    assert ess_log_weights(lam, VCPOConfig(ess_weights="capped"))[1] == math.log(8.0)


def test_capping_without_a_cap_is_refused():
    with pytest.raises(ConfigError, match="--vcpo-correction-upper"):
        ess_log_weights(tensor([0.0]), VCPOConfig(ess_weights="capped", correction="none"))
