"""vcpo_loss: value and gradient against the oracle, and its invariants."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.objective import (
    CORRECTIONS,
    advantage_scales,
    sequence_log_weights,
    trajectory_baselines,
    trajectory_energies,
    trajectory_log_energies,
    usable_trajectories,
    vcpo_loss,
)
from tests.oracle.estimator import Sample, Settings, baselines, minibatch
from tests.oracle.minibatches import loss_and_gradient, pack, per_trajectory, random_samples

NAMES = sorted(CORRECTIONS)
AGGREGATIONS = ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean"]
BASELINES = ["none", "mean", "leave-one-out", "opob", "opob-leave-one-out"]

any_settings = st.builds(
    Settings,
    correction=st.sampled_from(NAMES),
    veto=st.sampled_from([0.0, 0.5]),
    baseline=st.sampled_from(BASELINES),
    scope=st.sampled_from(["group", "minibatch"]),
    energy=st.sampled_from(["logit", "length"]),
    normalization=st.sampled_from(["none", "group-std", "minibatch-std"]),
    aggregation=st.sampled_from(AGGREGATIONS),
    kl=st.sampled_from([0.0, 0.3]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    entropy=st.sampled_from([0.0, 0.02]),
)
seeds = st.integers(0, 1000)


def assert_equals_oracle(samples, settings, inputs):
    outputs, gradient = loss_and_gradient(inputs)
    loss, expected, _ = minibatch(samples, settings)
    assert outputs.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    for ours, theirs in zip(per_trajectory(gradient, inputs), expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    assert (gradient[~inputs.mask] == 0.0).all()


@pytest.mark.parametrize(("correction", "aggregation"), itertools.product(NAMES, AGGREGATIONS))
@pytest.mark.parametrize("spread", [1e-4, 0.7])
def test_every_correction_and_aggregation_equals_the_oracle(correction, aggregation, spread):
    settings = Settings(correction=correction, aggregation=aggregation)
    samples = random_samples(11, groups=6, spread=spread)
    assert_equals_oracle(samples, settings, pack(samples, settings))


@given(any_settings, seeds)
def test_any_settings_equal_the_oracle(settings, seed):
    samples = random_samples(seed)
    assert_equals_oracle(samples, settings, pack(samples, settings, seed=seed))


@given(seeds)
def test_entropy_bonus_has_its_own_gradient(seed):
    settings = Settings(entropy=0.05)
    samples = random_samples(seed)
    inputs = pack(samples, settings)
    (gradient,) = torch.autograd.grad(vcpo_loss(inputs).loss, inputs.entropy)
    for ours, theirs in zip(per_trajectory(gradient, inputs), minibatch(samples, settings)[2]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("correction", sorted(set(NAMES) - {"gspo", "ppo-clip"}))
def test_on_policy_the_loss_is_reinforce_with_that_baseline(correction):
    settings = Settings(correction=correction, aggregation="seq-mean-token-sum", normalization="none")
    samples = random_samples(12, groups=5, spread=0.0)
    inputs = pack(samples, settings)
    outputs, gradient = loss_and_gradient(inputs)
    policy = inputs.policy_logprobs.detach().clone().requires_grad_()
    advantages = torch.tensor(
        [s.reward - b for s, b in zip(samples, baselines(samples, settings))], dtype=torch.float64
    )
    log_likelihood = sequence_log_weights(policy, torch.zeros_like(policy), inputs.mask, inputs.cu_seqlens)
    reinforce = -(advantages * log_likelihood).mean()
    reinforce.backward()
    torch.testing.assert_close(outputs.loss, reinforce, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, policy.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("correction", ["gspo", "ppo-clip"])
def test_on_policy_the_clipped_surrogates_have_the_gradient_of_reinforce(correction):
    samples = random_samples(12, groups=5, spread=0.0)
    _, clipped = loss_and_gradient(pack(samples, Settings(correction=correction)))
    _, reinforce = loss_and_gradient(pack(samples, Settings(correction="none")))
    torch.testing.assert_close(clipped, reinforce, rtol=1e-12, atol=1e-14)


@given(any_settings.filter(lambda s: s.baseline != "none"), seeds, st.sampled_from([-3.0, 100.0]))
def test_a_constant_added_to_all_rewards_leaves_the_gradient(settings, seed, constant):
    samples = random_samples(seed)
    shifted = [replace(s, reward=s.reward + constant) for s in samples]
    _, before = loss_and_gradient(pack(samples, settings))
    _, after = loss_and_gradient(pack(shifted, settings))
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-11)


@given(any_settings, seeds, st.sampled_from([1e-6, 3.0, 1e6]))
def test_rewards_times_s_scale_the_gradient_by_s_or_not_at_all_when_normalized(settings, seed, factor):
    settings = replace(settings, kl=0.0, entropy=0.0)
    samples = random_samples(seed)
    scaled = [replace(s, reward=s.reward * factor) for s in samples]
    _, before = loss_and_gradient(pack(samples, settings))
    _, after = loss_and_gradient(pack(scaled, settings))
    factor = factor if settings.normalization == "none" else 1.0
    torch.testing.assert_close(after, factor * before, rtol=1e-9, atol=1e-12 * factor)


@given(any_settings.filter(lambda s: s.baseline != "none" and s.scope == "group"), seeds)
def test_zero_variance_group_contributes_exactly_nothing(settings, seed):
    settings = replace(settings, kl=0.0, entropy=0.0, normalization="none")
    samples = random_samples(seed, spread=2.0)
    flat = samples[0].group
    samples = [replace(s, reward=0.1) if s.group == flat else s for s in samples]
    inputs = pack(samples, settings)
    _, gradient = loss_and_gradient(inputs)
    for sample, ours in zip(samples, per_trajectory(gradient, inputs)):
        assert sample.group != flat or (ours == 0.0).all()


@given(any_settings, seeds)
def test_any_split_and_order_of_whole_groups_gives_the_same_loss_and_gradient(settings, seed):
    settings = replace(settings, scope="group")
    samples = random_samples(seed)
    outputs, gradient = loss_and_gradient(pack(samples, settings))
    expected = dict(zip(map(id, samples), per_trajectory(gradient, pack(samples, settings))))
    total = 0.0
    for group in {s.group for s in samples}:
        part = [s for s in samples if s.group == group][::-1]
        inputs = pack(part, settings, whole=samples, seed=seed, prompt=seed % 3)
        part_outputs, part_gradient = loss_and_gradient(inputs)
        total += part_outputs.loss.item()
        for sample, ours in zip(part, per_trajectory(part_gradient, inputs)):
            np.testing.assert_allclose(ours, expected[id(sample)], rtol=1e-9, atol=1e-12)
    assert total == pytest.approx(outputs.loss.item(), rel=1e-9, abs=1e-12)


def scope_baselines(samples, settings):
    """Baselines of the whole minibatch by the functions for callers whose scopes span micro-batches."""
    whole = pack(samples, settings)
    columns = {
        "policy_logprobs": whole.policy_logprobs,
        "behavior_logprobs": whole.behavior_logprobs,
        "mask": whole.mask,
        "cu_seqlens": whole.cu_seqlens,
    }
    log_weights = sequence_log_weights(**columns).detach()
    log_energies = trajectory_log_energies(
        log_weights=log_weights,
        lengths=torch.tensor([s.length for s in samples]),
        energies=trajectory_energies(**columns, token_energies=whole.token_energies, config=whole.config),
        config=whole.config,
        num_trajectories=whole.num_trajectories,
        num_tokens=whole.num_tokens,
        max_response_length=whole.max_response_length,
    )
    return trajectory_baselines(
        rewards=whole.rewards,
        group_ids=whole.group_ids,
        log_energies=log_energies,
        config=whole.config,
        usable=torch.isfinite(log_weights),
    )


@given(any_settings, seeds, st.integers(1, 4))
def test_any_split_of_scopes_with_baselines_from_the_caller_gives_the_same_loss_and_gradient(settings, seed, parts):
    samples = random_samples(seed)
    loss, gradients, _ = minibatch(samples, settings)
    expected = dict(zip(map(id, samples), gradients))
    values = scope_baselines(samples, settings)
    order = np.random.default_rng(seed).permutation(len(samples))
    total = 0.0
    for chunk in np.array_split(order, parts):
        part = [samples[i] for i in chunk]
        inputs = pack(part, settings, whole=samples, seed=seed, baselines=values)
        outputs, gradient = loss_and_gradient(inputs)
        total += outputs.loss.item()
        for sample, ours in zip(part, per_trajectory(gradient, inputs)):
            np.testing.assert_allclose(ours, expected[id(sample)], rtol=1e-9, atol=1e-12)
    assert total == pytest.approx(loss, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["policy", "behavior", "reward", "reference", "entropy"])
@pytest.mark.parametrize("baseline", ["none", "mean", "leave-one-out", "opob", "opob-leave-one-out"])
@pytest.mark.parametrize(
    ("correction", "normalization", "aggregation"),
    zip(NAMES, itertools.cycle(["group-std", "minibatch-std", "none"]), itertools.cycle(AGGREGATIONS)),
)
def test_a_trajectory_that_is_not_finite_is_as_if_it_were_not_there(
    correction, normalization, aggregation, baseline, where, value
):
    settings = Settings(
        correction=correction,
        baseline=baseline,
        normalization=normalization,
        aggregation=aggregation,
        kl=0.2,
        entropy=0.1,
    )
    samples = [s for s in random_samples(13, groups=4) if s.length]
    broken = 1
    assert sum(s.group == samples[broken].group for s in samples) > 1
    sample = samples[broken]
    if where == "reward":
        bad = replace(sample, reward=value)
    else:
        column = getattr(sample, where).copy()
        column[-1] = value
        bad = replace(sample, **{where: column})
    rest = samples[:broken] + samples[broken + 1 :]
    # What the owner of a minibatch does: one definition of usable, and everything of the whole minibatch from it.
    inputs = pack([*samples[:broken], bad, *samples[broken + 1 :]], settings)
    usable = usable_trajectories(
        policy_logprobs=inputs.policy_logprobs,
        behavior_logprobs=inputs.behavior_logprobs,
        mask=inputs.mask,
        cu_seqlens=inputs.cu_seqlens,
        rewards=inputs.rewards,
        config=inputs.config,
        reference_logprobs=inputs.reference_logprobs,
        entropy=inputs.entropy,
    )
    assert usable.tolist() == [i != broken for i in range(len(samples))]
    inputs = replace(
        inputs,
        num_trajectories=float(usable.sum()),
        num_tokens=float(sum(s.length for s, kept in zip(samples, usable) if kept)),
        advantage_scales=advantage_scales(
            torch.where(usable, inputs.rewards, torch.nan), inputs.group_ids, normalization
        ),
    )
    outputs, gradient = loss_and_gradient(inputs)
    loss, expected, _ = minibatch(rest, settings)
    expected.insert(broken, np.zeros(sample.length))
    assert outputs.loss.item() == pytest.approx(loss, rel=1e-9)
    for ours, theirs in zip(per_trajectory(gradient, inputs), expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-13)
    assert outputs.metrics["nonfinite_trajectories"].tolist() == [1.0, len(samples)]
    without = loss_and_gradient(pack(rest, settings))[0]
    assert outputs.metrics["pg_loss"].tolist() == pytest.approx(without.metrics["pg_loss"].tolist())
    assert outputs.metrics["reward"].tolist() == pytest.approx([sum(s.reward for s in rest), len(rest)])
    assert all(torch.isfinite(metric).all() for metric in outputs.metrics.values())


def test_measurements_that_do_not_enter_the_loss_cost_no_trajectory():
    samples = random_samples(14)
    length = pack(samples, Settings()).mask.numel()
    bad = torch.full((length,), math.nan, dtype=torch.float64)
    outputs = vcpo_loss(pack(samples, Settings(), reference_logprobs=bad, entropy=bad))
    assert outputs.loss.item() == pytest.approx(minibatch(samples, Settings())[0])
    assert outputs.metrics["nonfinite_trajectories"][0] == 0.0
    assert outputs.metrics["kl"].tolist() == outputs.metrics["entropy"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 80.0, -80.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("correction", NAMES)
def test_huge_log_ratios_leave_loss_gradient_and_metrics_finite(correction, dtype, log_ratio):
    settings = Settings(correction=correction, kl=0.1)
    samples = [s for s in random_samples(15) if s.length]
    samples = [replace(s, behavior=s.policy - (log_ratio if i % 2 else 0.0)) for i, s in enumerate(samples)]
    samples[0] = replace(samples[0], reference=samples[0].policy + abs(log_ratio))
    outputs, gradient = loss_and_gradient(pack(samples, settings, dtype=dtype))
    assert torch.isfinite(outputs.loss)
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(metric).all() for metric in outputs.metrics.values())


@pytest.mark.parametrize("energy", [0.0, 1e-300, 1e300, math.inf, math.nan])
@pytest.mark.parametrize("correction", ["sequence-tis", "token-tis", "token-mis"])
def test_extreme_energies_leave_the_loss_finite_and_are_counted(correction, energy):
    settings = Settings(correction=correction)
    samples = [replace(s, energy=np.full(s.length, energy)) for s in random_samples(16)]
    outputs, gradient = loss_and_gradient(pack(samples, settings))
    assert torch.isfinite(outputs.loss)
    assert torch.isfinite(gradient).all()
    usable = 0.0 < energy < math.inf
    if usable:
        assert outputs.metrics["baseline_fallbacks"][0] == sum(
            all(p.length == 0 for p in samples if p.group == s.group) for s in samples
        )
    else:
        assert outputs.metrics["baseline_fallbacks"].tolist() == [len(samples)] * 2
        expected = minibatch(samples, replace(settings, baseline="mean"))[0]
        assert outputs.loss.item() == pytest.approx(expected)


def test_a_dropped_token_with_a_bad_energy_does_not_spoil_its_trajectory():
    settings = Settings(correction="token-mis", upper=2.0)
    samples = [s for s in random_samples(17) if s.length > 1]
    first = samples[0]
    behavior, energy = first.behavior.copy(), first.energy.copy()
    behavior[0], energy[0] = first.policy[0] - 3.0, 0.7
    samples[0] = replace(first, behavior=behavior, energy=energy)
    expected = vcpo_loss(pack(samples, settings)).loss
    energy[0] = math.inf
    torch.testing.assert_close(vcpo_loss(pack(samples, settings)).loss, expected)


@pytest.mark.parametrize("correction", NAMES)
def test_an_empty_or_fully_masked_micro_batch_gives_zero_with_a_graph_and_the_same_metrics(correction):
    settings = Settings(correction=correction)
    samples = random_samples(18)
    keys = vcpo_loss(pack(samples, settings)).metrics.keys()
    for inputs in (
        pack([], settings, whole=samples),
        pack([], settings, whole=samples, padding=0),
        pack(samples, settings, mask=torch.zeros_like(pack(samples, settings).mask)),
    ):
        outputs, gradient = loss_and_gradient(inputs)
        assert outputs.loss.item() == 0.0
        assert (gradient == 0.0).all()
        assert outputs.metrics.keys() == keys
        assert all(m.shape == (2,) and torch.isfinite(m).all() for m in outputs.metrics.values())


def test_nothing_usable_at_all_is_zero_not_nan():
    samples = [replace(s, reward=math.nan) for s in random_samples(19)]
    outputs, gradient = loss_and_gradient(pack(samples, Settings(), num_trajectories=0.0, num_tokens=0.0))
    assert outputs.loss.item() == 0.0
    assert (gradient == 0.0).all()


def test_padding_marked_as_sampled_does_not_matter():
    samples = random_samples(20)
    inputs = pack(samples, Settings())
    mask = inputs.mask.clone()
    mask[int(inputs.cu_seqlens[-1]) :] = True
    ours, gradient = loss_and_gradient(replace(inputs, mask=mask))
    assert ours.loss.item() == vcpo_loss(inputs).loss.item()
    assert torch.isfinite(gradient).all()


def test_half_precision_log_probs_are_computed_in_single_precision():
    samples = random_samples(21)
    inputs = pack(samples, Settings(), dtype=torch.bfloat16)
    rounded = pack(samples, Settings(), dtype=torch.float32)
    with torch.no_grad():
        for name in ("policy_logprobs", "behavior_logprobs", "token_energies"):
            getattr(rounded, name).copy_(getattr(inputs, name))
    outputs = vcpo_loss(inputs)
    assert outputs.loss.dtype == torch.float32
    torch.testing.assert_close(outputs.loss, vcpo_loss(rounded).loss)


def test_terms_are_added_in_double_precision():
    settings = Settings(correction="none", baseline="none", normalization="none", aggregation="seq-mean-token-sum")
    first, second = (np.array([-1e8, *[-1.0] * 200]), np.array([-1e8]))
    samples = [
        Sample(policy=p, behavior=p, reward=r, group=0, energy=p, reference=p, entropy=p)
        for p, r in ((first, 1.0), (second, -1.0))
    ]
    assert vcpo_loss(pack(samples, settings, dtype=torch.float32)).loss.item() == 100.0


def test_two_calls_give_bitwise_equal_losses_and_gradients():
    samples = random_samples(22, groups=20)
    first = loss_and_gradient(pack(samples, Settings(), dtype=torch.float32))
    second = loss_and_gradient(pack(samples, Settings(), dtype=torch.float32))
    assert torch.equal(first[0].loss, second[0].loss)
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (VCPOConfig(kl_coefficient=0.1), "reference_logprobs"),
        (VCPOConfig(entropy_coefficient=0.1), "entropy"),
        (VCPOConfig(), "token_energies"),
        (VCPOConfig(energy="exact"), "baselines"),
    ],
)
def test_a_missing_input_is_named(config, name):
    inputs = pack(random_samples(23), Settings(), config=config, token_energies=None)
    with pytest.raises(ValueError, match=name):
        vcpo_loss(inputs)


def test_energies_are_not_asked_for_where_no_baseline_needs_them():
    samples = random_samples(23)
    settings = Settings(baseline="mean")
    outputs = vcpo_loss(pack(samples, settings, token_energies=None))
    assert outputs.loss.item() == pytest.approx(minibatch(samples, settings)[0])


def test_an_optimal_baseline_without_energies_is_refused():
    with pytest.raises(ValueError, match="log_energies"):
        trajectory_baselines(
            rewards=torch.zeros(2), group_ids=torch.zeros(2).long(), log_energies=None, config=VCPOConfig()
        )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("correction", NAMES)
def test_a_log_weight_that_is_not_finite_marks_its_energy_unusable(correction, value):
    result = trajectory_log_energies(
        log_weights=torch.tensor([value, 0.0], dtype=torch.float64),
        lengths=torch.tensor([2, 2]),
        energies=torch.ones(2),
        config=VCPOConfig(correction=correction, aggregation="seq-mean-token-sum"),
        num_trajectories=2.0,
        num_tokens=4.0,
        max_response_length=2,
    )
    assert math.isnan(result[0])
    assert result[1] == 0.0


@pytest.mark.parametrize("baseline", ["mean", "leave-one-out", "opob", "opob-leave-one-out"])
def test_unusable_trajectories_take_no_part_in_baselines_for_callers(baseline):
    config = VCPOConfig(baseline=baseline)
    rewards, log_e = torch.tensor([1.0, 50.0, 3.0, 4.0]), torch.tensor([0.0, 9.0, 1.0, 2.0])
    groups, usable = torch.zeros(4).long(), torch.tensor([True, False, True, True])
    result = trajectory_baselines(rewards=rewards, group_ids=groups, log_energies=log_e, config=config, usable=usable)
    clean = trajectory_baselines(
        rewards=rewards[usable], group_ids=groups[usable], log_energies=log_e[usable], config=config
    )
    torch.testing.assert_close(result[usable], clean)
