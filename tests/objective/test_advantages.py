"""Advantages of a user's own: found, checked, and in the gradient in place of (reward - baseline) * scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.objective import AdvantageInputs, checked_advantages, load_advantages
from tests.oracle.estimator import Settings
from tests.oracle.minibatches import loss_and_gradient, pack, random_samples

INPUTS = AdvantageInputs(
    rewards=torch.tensor([1.0, 0.0, 0.5]).double(),
    group_ids=torch.tensor([7, 7, 2]),
    lengths=torch.tensor([3, 0, 5]),
    config=VCPOConfig(advantages="mine:own", baseline="none", reward_normalization="none"),
)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (torch.zeros(2), r"shape \(3,\), not \(2,\)"),
        (torch.zeros(3, 1), r"shape \(3,\), not \(3, 1\)"),
        ([0.0, 0.0, 0.0], "not list"),
        (torch.tensor([0.0, float("nan"), 0.0]), "returned nan for trajectory 1 of 3, whose reward is 0.0"),
        (torch.tensor([0.0, 0.0, float("inf")]), "returned inf for trajectory 2"),
        (torch.tensor([0.0, 1e300, 0.0], dtype=torch.float64), "returned 1e[+]300 for trajectory 1"),
        (torch.zeros(3, dtype=torch.complex64), "real numbers in a plain tensor"),
        (torch.zeros(3).to_sparse(), "real numbers in a plain tensor"),
    ],
)
def test_anything_but_one_finite_number_a_trajectory_is_refused_by_the_flag(returned, said) -> None:
    with pytest.raises(ConfigError, match="--vcpo-advantages mine:own .*" + said):
        checked_advantages(lambda _: returned, INPUTS)


def test_advantages_carry_no_gradient_and_are_in_double_precision() -> None:
    values = checked_advantages(lambda inputs: inputs.rewards.float().requires_grad_(), INPUTS)
    assert (values.dtype, values.requires_grad) == (torch.float64, False)


def test_without_the_flag_there_is_no_function() -> None:
    assert load_advantages(None) is None


def test_a_baseline_beside_them_is_refused() -> None:
    for changes in ({}, {"baseline": "none"}, {"reward_normalization": "none"}):
        with pytest.raises(ConfigError, match="takes the place of baseline and normalization"):
            VCPOConfig(advantages="mine:own", **changes).validate()
    INPUTS.config.validate()


def test_they_stand_where_reward_less_baseline_times_scale_stood() -> None:
    samples = random_samples(3, groups=5)
    settings = Settings(baseline="mean", normalization="group-std")
    built_in = pack(samples, settings)
    # The oracle's own arithmetic, trajectory by trajectory.
    groups = [[s for s in samples if s.group == sample.group] for sample in samples]
    deviations = [np.std([s.reward for s in group]) for group in groups]
    own = [
        (sample.reward - np.mean([s.reward for s in group])) / deviation if deviation > 1e-9 else 0.0
        for sample, group, deviation in zip(samples, groups, deviations)
    ]
    given = replace(
        pack(samples, Settings(baseline="none", normalization="none")),
        advantages=torch.tensor(own, dtype=torch.float64),
    )
    (expected, gradient), (outputs, own_gradient) = loss_and_gradient(built_in), loss_and_gradient(given)
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    torch.testing.assert_close(own_gradient, gradient, rtol=1e-5, atol=1e-9)
    assert gradient.abs().max() > 1e-3
