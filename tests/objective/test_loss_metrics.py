"""What vcpo_loss reports beside the loss."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_vcpo.objective import kl_estimate, vcpo_loss
from tests.oracle.estimator import Settings, baselines, is_vetoed, kl_terms, minibatch, scales, token_weights
from tests.oracle.minibatches import pack, random_samples


def metric(outputs, name):
    total, count = outputs.metrics[name].tolist()
    return pytest.approx(total / count, rel=1e-9, abs=1e-12)


def test_metrics_are_the_means_they_are_named_after():
    settings = Settings(kl=0.1, entropy=0.1)
    samples = random_samples(30, groups=6)
    outputs = vcpo_loss(pack(samples, settings))
    tokens = np.concatenate([s.policy - s.behavior for s in samples])
    values = baselines(samples, settings)
    advantages = [abs((s.reward - b) * f) for s, b, f in zip(samples, values, scales(samples, settings))]
    nonempty = [s for s in samples if s.length]
    assert np.mean([s.reward for s in samples]) == metric(outputs, "reward")
    assert np.mean(values) == metric(outputs, "baseline")
    assert np.mean(advantages) == metric(outputs, "advantage_abs")
    assert np.mean([token_weights(s, settings)[0] for s in nonempty]) == metric(outputs, "weight")
    assert np.mean(abs(tokens)) == metric(outputs, "mismatch_abs")
    assert np.mean(np.exp(tokens) - 1 - tokens) == metric(outputs, "mismatch_k3")
    assert np.mean(np.concatenate([s.entropy for s in samples])) == metric(outputs, "entropy")
    assert np.mean(np.concatenate([kl_terms(s, "k3")[0] for s in samples])) == metric(outputs, "kl")
    assert np.mean([s.length for s in samples]) == metric(outputs, "response_length")
    assert metric(outputs, "nonfinite_trajectories") == metric(outputs, "vetoed") == 0.0


def test_metrics_carry_no_gradient():
    outputs = vcpo_loss(pack(random_samples(31), Settings(kl=0.1, entropy=0.1)))
    assert not any(m.requires_grad for m in outputs.metrics.values())


@pytest.mark.parametrize("correction", ["sequence-tis", "token-tis"])
def test_weights_that_a_bound_changed_are_counted_by_trajectory_or_token(correction):
    settings = Settings(correction=correction, upper=1.2)
    samples = random_samples(32, groups=6)
    outputs = vcpo_loss(pack(samples, settings))
    if correction == "token-tis":
        above = np.concatenate([np.exp(s.policy - s.behavior) > 1.2 for s in samples])
    else:
        above = np.array([math.exp(s.log_weight) > 1.2 for s in samples if s.length])
    assert above.any()
    assert outputs.metrics["weight_clipped"].tolist() == [above.sum(), above.size]


@pytest.mark.parametrize("correction", ["sequence-tis", "token-tis"])
def test_vetoed_trajectories_are_counted_and_weigh_nothing(correction):
    settings = Settings(correction=correction, veto=0.6)
    samples = random_samples(33, groups=6)
    outputs = vcpo_loss(pack(samples, settings))
    dropped = [is_vetoed(s, settings) for s in samples]
    assert any(dropped)
    assert not all(dropped)
    assert outputs.metrics["vetoed"].tolist() == [sum(dropped), len(samples)]
    weights = [token_weights(s, settings) * (not d) for s, d in zip(samples, dropped) if s.length]
    weights = np.concatenate(weights) if correction == "token-tis" else [w[0] for w in weights]
    assert np.mean(weights) == metric(outputs, "weight")


def test_policy_loss_is_reported_without_penalties_and_its_counts_add_up_to_one():
    settings = Settings(kl=0.5, entropy=0.1)
    samples = random_samples(34)
    groups = {s.group for s in samples}
    parts = [
        vcpo_loss(pack([s for s in samples if s.group == g], settings, whole=samples)).metrics["pg_loss"]
        for g in groups
    ]
    expected = minibatch(samples, replace(settings, kl=0.0, entropy=0.0))[0]
    np.testing.assert_allclose(sum(parts), [expected, 1.0], rtol=1e-9)


def test_kl_and_entropy_that_were_not_given_count_nothing():
    outputs = vcpo_loss(pack(random_samples(35), Settings()))
    assert outputs.metrics["kl"].tolist() == outputs.metrics["entropy"].tolist() == [0.0, 0.0]


def test_baselines_from_the_caller_are_used_and_reported():
    samples = random_samples(36)
    given = torch.arange(len(samples), dtype=torch.float64)
    outputs = vcpo_loss(pack(samples, Settings(), baselines=given))
    assert given.mean().item() == metric(outputs, "baseline")
    assert metric(outputs, "baseline_fallbacks") == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_equal_the_oracle(estimator):
    sample = random_samples(37, groups=8)[0]
    policy = torch.tensor(sample.policy, requires_grad=True)
    value = kl_estimate(policy, torch.tensor(sample.reference), estimator)
    value.sum().backward()
    expected, slope = kl_terms(sample, estimator)
    np.testing.assert_allclose(value.detach(), expected, rtol=1e-12)
    np.testing.assert_allclose(policy.grad, slope, rtol=1e-12)


@pytest.mark.parametrize("distance", [19.0, 20.0, 21.0, 1e4])
def test_k3_far_from_the_reference_is_finite_and_still_pulls_towards_it(distance):
    policy = torch.tensor([-distance], requires_grad=True)
    value = kl_estimate(policy, torch.zeros(1), "k3")
    value.backward()
    assert torch.isfinite(value)
    assert value > 0
    assert -math.exp(20.01) < policy.grad.item() < -math.exp(18.99)
    nearer = kl_estimate(torch.tensor([-distance + 0.5]), torch.zeros(1), "k3")
    assert nearer < value
