"""Optimal and mean baselines, and reward scales."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_vcpo.objective import advantage_scales, mean_baseline, optimal_baseline, optimal_baseline_with_fallbacks
from tests.oracle.estimator import Sample, Settings, scales, weighted_baseline

bad = st.sampled_from([-math.inf, math.inf, math.nan])
members = st.lists(
    st.tuples(
        st.floats(-10, 10).map(lambda x: round(x, 3)),
        st.one_of(st.floats(-20, 20), bad),
        st.sampled_from([5, -3, 1 << 50]),
    ),
    min_size=1,
    max_size=14,
)


def columns(batch):
    rewards, log_energies, groups = zip(*batch)
    return (
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(log_energies, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
    )


def energies(log_energies):
    return [math.inf if e == math.inf else math.exp(e) for e in log_energies.tolist()]


@given(members, st.booleans())
def test_optimal_baseline_equals_the_oracle(batch, leave_one_out):
    rewards, log_e, groups = columns(batch)
    expected = weighted_baseline(rewards.tolist(), energies(log_e), groups.tolist(), leave_one_out)
    result = optimal_baseline(rewards, log_e, groups, leave_one_out=leave_one_out)
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9)


@given(members, st.booleans())
def test_mean_baseline_equals_the_oracle(batch, leave_one_out):
    rewards, _, groups = columns(batch)
    expected = weighted_baseline(rewards.tolist(), [1.0] * len(batch), groups.tolist(), leave_one_out)
    np.testing.assert_allclose(
        mean_baseline(rewards, groups, leave_one_out=leave_one_out), expected, rtol=1e-12, atol=1e-12
    )


@given(members, st.booleans(), st.sampled_from([-1e3, -70.0, 70.0, 1e3]))
def test_scaling_all_energies_changes_nothing(batch, leave_one_out, shift):
    rewards, log_e, groups = columns(batch)
    torch.testing.assert_close(
        optimal_baseline(rewards, log_e + shift, groups, leave_one_out=leave_one_out),
        optimal_baseline(rewards, log_e, groups, leave_one_out=leave_one_out),
        rtol=1e-9,
        atol=1e-9,
    )


@given(
    members, st.booleans(), st.sampled_from([0.1, 1 / 3, -7.7, 1e8]), st.sampled_from([torch.float32, torch.float64])
)
def test_equal_rewards_are_their_own_baseline_to_the_bit(batch, leave_one_out, reward, dtype):
    _, log_e, groups = columns(batch)
    rewards = torch.full((len(batch),), reward, dtype=dtype)
    for result in (
        optimal_baseline(rewards, log_e, groups, leave_one_out=leave_one_out),
        mean_baseline(rewards, groups, leave_one_out=leave_one_out),
    ):
        assert ((rewards - result) == 0.0).all()


@given(members)
def test_the_optimal_baseline_minimizes_the_second_moment(batch):
    rewards, log_e, groups = columns(batch)
    log_e = torch.where(torch.isfinite(log_e), log_e, 0.0)
    best = optimal_baseline(rewards, log_e, groups)

    def moment(baseline):
        return ((log_e - log_e.max()).exp() * (rewards - baseline).square()).sum()

    assert moment(best) <= moment(best + 1e-3)
    assert moment(best) <= moment(best - 1e-3)


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_order_of_trajectories_does_not_matter(leave_one_out):
    torch.manual_seed(0)
    rewards, log_e, groups = torch.randn(40), 9 * torch.randn(40), torch.randint(5, (40,))
    order = torch.randperm(40)
    torch.testing.assert_close(
        optimal_baseline(rewards[order], log_e[order], groups[order], leave_one_out=leave_one_out),
        optimal_baseline(rewards, log_e, groups, leave_one_out=leave_one_out)[order],
        rtol=1e-12,
        atol=1e-12,
    )


def test_leaving_out_a_dominating_energy_does_not_cancel_the_others():
    rewards = torch.tensor([5.0, 1.0, 3.0], dtype=torch.float64)
    log_e = torch.tensor([500.0, -500.0, -500.0 + math.log(3.0)], dtype=torch.float64)
    result = optimal_baseline(rewards, log_e, torch.zeros(3).long(), leave_one_out=True)
    np.testing.assert_allclose(result, [(1 + 3 * 3) / 4, 5.0, 5.0], rtol=1e-12)


def test_leave_one_out_does_not_see_the_own_reward():
    log_e, groups = torch.tensor([0.3, 1.0, -2.0]), torch.zeros(3).long()
    for i in range(3):
        low, high = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 4.0])
        high[i] = 3.0
        results = [optimal_baseline(r, log_e, groups, leave_one_out=True)[i].item() for r in (low, high)]
        assert results[0] == pytest.approx(results[1], rel=1e-12)


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_a_group_without_usable_energies_falls_back_to_the_mean_and_is_counted(value):
    rewards = torch.tensor([0.0, 1.0, 7.0, 9.0])
    log_e = torch.tensor([value, value, 0.0, 100.0])
    groups = torch.tensor([1, 1, 2, 2])
    result = optimal_baseline_with_fallbacks(rewards, log_e, groups)
    assert result.values.tolist() == [0.5, 0.5, 9.0, 9.0]
    assert result.fallback.tolist() == [True, True, False, False]


def test_leave_one_out_falls_back_to_the_mean_of_the_others_where_only_the_own_energy_is_usable():
    rewards = torch.tensor([4.0, 1.0, 2.0])
    log_e = torch.tensor([0.0, -math.inf, math.nan])
    result = optimal_baseline_with_fallbacks(rewards, log_e, torch.zeros(3).long(), leave_one_out=True)
    assert result.values.tolist() == [1.5, 4.0, 4.0]
    assert result.fallback.tolist() == [True, False, False]


def test_a_group_of_one_has_its_own_reward_as_baseline():
    rewards, log_e, groups = torch.tensor([0.3, 5.0]), torch.tensor([1.0, math.nan]), torch.tensor([0, 1])
    for leave_one_out in (False, True):
        assert torch.equal(optimal_baseline(rewards, log_e, groups, leave_one_out=leave_one_out).float(), rewards)
        assert torch.equal(mean_baseline(rewards, groups, leave_one_out=leave_one_out).float(), rewards)


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_takes_no_part(value, leave_one_out):
    rewards = torch.tensor([1.0, value, 4.0, 2.0, value])
    log_e = torch.tensor([0.1, 50.0, 0.2, 0.3, 0.0])
    groups = torch.tensor([0, 0, 0, 0, 9])
    kept = [0, 2, 3]
    for ours, clean in (
        (
            optimal_baseline(rewards, log_e, groups, leave_one_out=leave_one_out),
            optimal_baseline(rewards[kept], log_e[kept], groups[kept], leave_one_out=leave_one_out),
        ),
        (
            mean_baseline(rewards, groups, leave_one_out=leave_one_out),
            mean_baseline(rewards[kept], groups[kept], leave_one_out=leave_one_out),
        ),
        (advantage_scales(rewards, groups, "group-std"), advantage_scales(rewards[kept], groups[kept], "group-std")),
        (
            advantage_scales(rewards, groups, "minibatch-std"),
            advantage_scales(rewards[kept], groups[kept], "minibatch-std"),
        ),
    ):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours[kept], clean, rtol=1e-12, atol=0)
    assert mean_baseline(rewards, groups)[4] == 0.0


@given(members, st.sampled_from(["none", "group-std", "minibatch-std"]))
def test_scales_equal_the_oracle(batch, mode):
    rewards, _, groups = columns(batch)
    none = np.zeros(0)
    samples = [
        Sample(policy=none, behavior=none, reward=r, group=g, energy=none)
        for r, g in zip(rewards.tolist(), groups.tolist())
    ]
    np.testing.assert_allclose(
        advantage_scales(rewards, groups, mode), scales(samples, Settings(normalization=mode)), rtol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_that_differ_by_rounding_only_do_not_vary(dtype):
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3 * (1 + 1e-7)], dtype=dtype)
    assert advantage_scales(rewards, torch.zeros(3).long(), "group-std").tolist() == [0.0] * 3


def test_tiny_rewards_are_scaled_like_large_ones():
    rewards, groups = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.zeros(2).long()
    for scale in (1e-12, 1.0, 1e12):
        np.testing.assert_allclose(advantage_scales(scale * rewards, groups, "group-std"), [2 / scale] * 2)
        with_bad = torch.cat([scale * rewards, torch.tensor([torch.nan], dtype=torch.float64)])
        beside = advantage_scales(with_bad, torch.zeros(3).long(), "group-std")
        np.testing.assert_allclose(beside[:2], [2 / scale] * 2)


def test_integer_rewards_and_an_empty_batch_are_legal():
    assert optimal_baseline(torch.tensor([0, 2]), torch.zeros(2), torch.tensor([3, 3])).tolist() == [1.0, 1.0]
    none = torch.zeros(0)
    for leave_one_out in (False, True):
        assert optimal_baseline(none, none, none.long(), leave_one_out=leave_one_out).shape == (0,)
    assert advantage_scales(none, none.long(), "group-std").shape == (0,)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="group_ids"):
        mean_baseline(torch.zeros(2), torch.zeros(3).long())
    with pytest.raises(ValueError, match="log_energies"):
        optimal_baseline(torch.zeros(2), torch.zeros(3), torch.zeros(2).long())
    with pytest.raises(ValueError, match="mode"):
        advantage_scales(torch.zeros(2), torch.zeros(2).long(), "std")
