"""Energies against definitions by differentiation and against the oracle."""

import math

import numpy as np
import pytest
import torch

from megatron_vcpo.objective import length_energy, log_energies, logit_energy, optimal_baseline, token_logit_energy


def random_logits(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64), torch.randint(shape[-1], shape[:-1])


def test_token_energy_is_the_squared_gradient_of_the_log_prob_by_the_logits():
    logits, targets = random_logits(7, 11)
    logits.requires_grad_()
    logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    energy = token_logit_energy(logits, targets)
    assert not energy.requires_grad
    torch.testing.assert_close(energy, gradient.square().sum(-1), rtol=1e-12, atol=0)


def test_token_energy_is_the_documented_formula():
    logits, targets = random_logits(7, 11)
    pi = torch.softmax(logits, -1)
    formula = 1 - 2 * pi.gather(-1, targets[:, None])[:, 0] + pi.square().sum(-1)
    torch.testing.assert_close(token_logit_energy(logits, targets), formula, rtol=1e-12, atol=0)


def test_a_sharp_policy_keeps_its_small_positive_energy_in_single_precision():
    logits = torch.tensor([[14.0, 0.0, 0.0, -math.inf]])
    others = math.exp(-14.0) / (1 + 2 * math.exp(-14.0))
    expected = (2 * others) ** 2 + 2 * others**2
    energy = token_logit_energy(logits, torch.tensor([0]))
    assert energy.dtype == torch.float32
    assert energy.item() == pytest.approx(expected, rel=1e-5)


def test_half_precision_logits_are_computed_in_single_precision():
    logits, targets = random_logits(3, 5)
    half = logits.to(torch.bfloat16)
    energy = token_logit_energy(half, targets)
    assert energy.dtype == torch.float32
    torch.testing.assert_close(energy, token_logit_energy(half.double(), targets).float(), rtol=1e-5, atol=0)


def test_padded_packed_and_single_layouts_agree_and_masked_positions_do_not_matter():
    logits, targets = random_logits(2, 4, 6)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    expected = torch.stack([token_logit_energy(logits, targets)[0, [0, 2]].sum(), torch.tensor(0.0).double()])
    logits[~mask], targets[~mask] = math.nan, -100
    torch.testing.assert_close(logit_energy(logits, targets, mask), expected)
    packed = logit_energy(logits.flatten(0, 1), targets.flatten(), mask.flatten(), torch.tensor([0, 4, 8]))
    torch.testing.assert_close(packed, expected)
    torch.testing.assert_close(logit_energy(logits[0], targets[0], mask[0]), expected[:1])
    assert logit_energy(logits.float(), targets, mask).dtype == torch.float64


def test_a_bad_logit_at_a_sampled_token_shows_in_its_trajectory_only():
    logits, targets = random_logits(2, 4, 6)
    logits[0, 1, 2] = math.nan
    energy = logit_energy(logits, targets, torch.ones(2, 4, dtype=torch.bool))
    assert math.isnan(energy[0])
    assert math.isfinite(energy[1])


def test_length_energy_counts_sampled_tokens():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    assert length_energy(mask).tolist() == [2.0, 0.0]
    assert length_energy(mask.flatten(), torch.tensor([0, 3, 6])).tolist() == [2.0, 0.0]
    assert length_energy(mask[0]).tolist() == [2.0]


def test_shapes_that_do_not_fit_are_refused():
    logits, targets = random_logits(2, 4, 6)
    with pytest.raises(ValueError, match="vocabulary"):
        logit_energy(logits, targets[:, :3], torch.ones(2, 3))
    with pytest.raises(ValueError, match="packed"):
        logit_energy(logits, targets, torch.ones(2, 4, dtype=torch.bool), torch.tensor([0, 4, 8]))


def test_log_energy_is_twice_weight_and_normalizer_plus_the_energy():
    result = log_energies(torch.tensor([0.5, 3.0]), torch.tensor([-1.0, 2.0]), torch.tensor([0.25, -4.0]))
    np.testing.assert_allclose(result, [math.log(math.exp(-2) * math.exp(0.5) * 0.5), 4.0 - 8.0 + math.log(3.0)])


@pytest.mark.parametrize(
    ("energy", "log_weight", "expected"),
    [
        (0.0, 0.0, -math.inf),
        (1.0, -math.inf, -math.inf),
        (1e-300, 0.0, math.log(1e-300)),
        (1e300, 0.0, math.log(1e300)),
        (1.0, 1e4, 2e4),
        (1.0, -1e4, -2e4),
        (math.inf, 0.0, math.nan),
        (math.nan, 0.0, math.nan),
        (-1.0, 0.0, math.nan),
        (1.0, math.nan, math.nan),
        (1.0, math.inf, math.nan),
    ],
)
def test_extreme_energies_and_weights_are_zero_usable_or_marked(energy, log_weight, expected):
    energy, log_weight = (torch.tensor([x], dtype=torch.float64) for x in (energy, log_weight))
    np.testing.assert_allclose(log_energies(energy, log_weight, torch.zeros(1)), [expected])


def test_extreme_energies_give_finite_baselines():
    energies = torch.tensor([0.0, 1e-300, 1e300, math.inf, math.nan], dtype=torch.float64)
    rewards = torch.arange(5.0, dtype=torch.float64)
    result = optimal_baseline(rewards, log_energies(energies, torch.zeros(5), torch.zeros(5)), torch.zeros(5).long())
    assert result.tolist() == [2.0] * 5
