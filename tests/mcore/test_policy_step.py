"""PolicyStep and register() on the real Megatron-Core: one process, against an independent computation."""

import dataclasses

import numpy as np
import pytest
import torch

import megatron_vcpo
from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.optim import EssSettings
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import SEQUENCE, VOCAB, Size, build_tiny_gpt, optimizer_step


@pytest.fixture(scope="module")
def groups():
    with single_process_megatron() as collection:
        yield collection


def make_trajectories(seed=0, count=8, group_size=4, shift=0.0):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        length = int(rng.integers(2, 14))
        out.append(
            Trajectory(
                prompt_ids=rng.integers(0, VOCAB, int(rng.integers(2, 7))).astype(np.int32),
                response_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                behavior_logprobs=(-4.1 + shift + 0.15 * rng.standard_normal(length)).astype(np.float32),
                versions=np.zeros(length, np.int32),
                response_mask=np.ones(length, bool),
                reward=float(rng.integers(0, 2)),
                group_id=i // group_size,
                index=i % group_size,
            )
        )
    return out


def register(tiny, config, **kwargs):
    return megatron_vcpo.register(
        config,
        model=tiny.model,
        optimizer=tiny.optimizer,
        scheduler=tiny.scheduler,
        groups=tiny.groups,
        vocab_size=VOCAB,
        sequence_length=SEQUENCE,
        max_response_length=16,
        **kwargs,
    )


def run_step(tiny, vcpo, trajectories, *, lag=0.0, repeat=True):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    schedule = get_forward_backward_func()
    while True:
        vcpo.begin(trajectories, model=tiny.model, forward_backward=schedule, lag=lag)
        success, grad_norm, gradient = optimizer_step(
            tiny.model, tiny.optimizer, vcpo.forward_step, list(vcpo.data_iterator()), SEQUENCE
        )
        if success:
            tiny.scheduler.step(len(trajectories))
        metrics = vcpo.end(success=success, grad_norm=grad_norm)
        if not (vcpo.repeat and repeat):
            return metrics, gradient


def reference_step(tiny, trajectories, temperature=1.0):
    """Sequence TIS, OPOB with logit energy, group std, seq-mean-token-mean: one forward per trajectory, plain
    autograd."""
    gpt = tiny.model[0].module
    sums, lam, energy, length = [], [], [], []
    for t in trajectories:
        ids = torch.tensor(np.concatenate([t.prompt_ids, t.response_ids])).long()
        mask = torch.triu(torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool), 1)
        logits = gpt(ids[None], torch.arange(len(ids))[None], mask)[0, len(t.prompt_ids) - 1 : -1, :VOCAB] / temperature
        log_pi = torch.log_softmax(logits.double(), -1)
        p = log_pi.gather(1, ids[len(t.prompt_ids) :, None])[:, 0]
        pi = log_pi.detach().exp()
        onehot = torch.nn.functional.one_hot(ids[len(t.prompt_ids) :], VOCAB)
        sums.append(p.sum() / len(p))
        lam.append((p.detach() - torch.tensor(t.behavior_logprobs).double()).sum())
        energy.append(((onehot - pi) ** 2).sum())
        length.append(len(p))
    lam, energy, length = torch.stack(lam), torch.stack(energy), torch.tensor(length).double()
    weight = lam.exp().clamp(max=8.0)
    rewards = torch.tensor([t.reward for t in trajectories]).double()
    group = torch.tensor([t.group_id for t in trajectories])
    advantage = torch.zeros_like(rewards)
    for g in group.unique():
        m = group == g
        e = weight[m] ** 2 * energy[m] / length[m] ** 2
        std = rewards[m].std(unbiased=False)
        if std > 0:
            advantage[m] = (rewards[m] - (e * rewards[m]).sum() / e.sum()) / std
    loss = -(weight * advantage * torch.stack(sums)).mean()
    grads = torch.autograd.grad(loss, [p for chunk in tiny.model for p in chunk.parameters()])
    rho = float(lam.exp().sum() ** 2 / (len(lam) * (2 * lam).exp().sum()))
    return float(loss), rho, torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("budget", [SEQUENCE * 4, SEQUENCE + 20, 24], ids=["one", "groups-apart", "groups-split"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_rho_and_loss_equal_plain_autograd_however_the_minibatch_is_packed(groups, budget, temperature):
    tiny = build_tiny_gpt(groups)
    trajectories = make_trajectories()
    loss, rho, gradient = reference_step(tiny, trajectories, temperature)
    vcpo = register(tiny, VCPOConfig(tokens_per_micro_batch=budget), temperature=temperature)
    metrics, ours = run_step(tiny, vcpo, trajectories)
    assert metrics["rho"] == pytest.approx(rho, rel=1e-5)
    assert metrics["pg_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
    assert metrics["lr_multiplier"] == pytest.approx(rho**0.5, rel=1e-5)
    torch.testing.assert_close(ours, gradient.float(), rtol=2e-4, atol=2e-7)
    assert float(ours.norm()) > 1e-3
    if budget == 24:
        assert metrics["n_micro_batches"] > 2


def test_the_learning_rate_of_the_step_is_the_scaled_one_and_the_base_comes_back(groups):
    tiny = build_tiny_gpt(groups, lr=0.25)
    vcpo = register(tiny, VCPOConfig())
    metrics, _ = run_step(tiny, vcpo, make_trajectories())
    assert metrics["lr"] == pytest.approx(0.25 * metrics["rho"] ** 0.5)
    assert 0.2 < metrics["rho"] < 0.999
    assert tiny.optimizer.param_groups[0]["lr"] == 0.25


def test_an_automatic_reference_is_taken_from_the_freshest_minibatches(groups):
    tiny = build_tiny_gpt(groups)
    tiny.scheduler.ess = EssSettings(reference=None)
    vcpo = register(tiny, VCPOConfig())
    rhos = [
        run_step(tiny, vcpo, make_trajectories(seed), lag=lag)[0]["rho"] for seed, lag in enumerate((2.0, 1.0, 2.0))
    ]
    assert len(set(rhos)) == 3
    assert tiny.scheduler.reference == rhos[1]


def test_minibatch_scope_over_many_micro_batches_equals_one(groups):
    results = []
    for budget in (400, 24):
        tiny = build_tiny_gpt(groups)
        config = VCPOConfig(tokens_per_micro_batch=budget, baseline_scope="minibatch", reward_normalization="none")
        results.append(run_step(tiny, register(tiny, config), make_trajectories()))
    (one, gradient_one), (many, gradient_many) = results
    assert one["n_micro_batches"] == 1
    assert many["n_micro_batches"] > 3
    torch.testing.assert_close(gradient_one, gradient_many, rtol=1e-4, atol=1e-7)
    assert one["baseline"] == pytest.approx(many["baseline"], rel=1e-6)


def test_kl_to_the_frozen_reference_is_zero_at_first_and_grows(groups):
    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, VCPOConfig(kl_coefficient=0.1))
    before = tiny.parameters()
    first, _ = run_step(tiny, vcpo, make_trajectories())
    assert abs(first["kl"]) < 1e-9
    assert any(not torch.equal(a, b) for a, b in zip(before, tiny.parameters()))
    second, _ = run_step(tiny, vcpo, make_trajectories())
    assert second["kl"] > 1e-6


def test_scoring_the_reference_leaves_the_policy_bit_identical(groups):
    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, VCPOConfig(kl_coefficient=0.1))
    run_step(tiny, vcpo, make_trajectories())
    before = tiny.parameters()
    from megatron.core.pipeline_parallel import get_forward_backward_func

    vcpo.begin(make_trajectories(1), model=tiny.model, forward_backward=get_forward_backward_func())
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters()))


def test_a_step_with_a_nan_in_the_policy_changes_no_parameter_no_moment_and_no_learning_rate(groups):
    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, VCPOConfig())
    run_step(tiny, vcpo, make_trajectories())
    weight = next(tiny.model[0].parameters())
    clean = weight.detach().clone()
    with torch.no_grad():
        weight.view(-1)[0] = float("nan")
    before = tiny.parameters()
    moments = [
        v.clone()
        for s in tiny.optimizer.chained_optimizers[0].optimizer.state.values()
        for v in s.values()
        if torch.is_tensor(v)
    ]
    metrics, _ = run_step(tiny, vcpo, make_trajectories(count=8))
    assert metrics["skipped"] == 1.0
    assert all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(before, tiny.parameters()))
    after = [
        v
        for s in tiny.optimizer.chained_optimizers[0].optimizer.state.values()
        for v in s.values()
        if torch.is_tensor(v)
    ]
    assert all(torch.equal(a, b) for a, b in zip(moments, after))
    assert tiny.optimizer.param_groups[0]["lr"] == 1e-2
    with torch.no_grad():
        weight.copy_(clean)
    assert run_step(tiny, vcpo, make_trajectories())[0]["skipped"] == 0.0


def test_a_minibatch_from_which_everything_was_rejected_is_skipped(groups):
    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, VCPOConfig())
    run_step(tiny, vcpo, make_trajectories())
    before = tiny.parameters()
    metrics, _ = run_step(tiny, vcpo, [])
    assert metrics["skipped"] == 1.0
    assert metrics["rho"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters()))


def test_extreme_importance_weights_never_give_a_full_step(groups):
    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, VCPOConfig())
    trajectories = make_trajectories()
    odd = dataclasses.replace(
        trajectories[0], behavior_logprobs=np.full(len(trajectories[0].response_ids), -1e4, np.float32)
    )
    metrics, gradient = run_step(tiny, vcpo, [odd, *trajectories[1:]])
    assert metrics["rho"] == pytest.approx(1 / 8, rel=1e-6)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_steps_run_and_an_fp16_overflow_is_a_skipped_step(groups, dtype):
    tiny = build_tiny_gpt(groups, params_dtype=dtype)
    vcpo = register(tiny, VCPOConfig())
    metrics, _ = run_step(tiny, vcpo, make_trajectories())
    assert metrics["skipped"] == 0.0
    assert 0.0 < metrics["rho"] <= 1.0
    if dtype == torch.float16:
        tiny.optimizer.chained_optimizers[0].grad_scaler._scale.fill_(1e30)
        before = tiny.parameters()
        metrics, _ = run_step(tiny, vcpo, make_trajectories(1))
        assert metrics["skipped"] == 1.0
        assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters()))
        assert tiny.optimizer.param_groups[0]["lr"] == 1e-2


def test_mixture_of_experts_gradient_equals_plain_autograd(groups):
    tiny = build_tiny_gpt(groups, size=Size(experts=4))
    trajectories = make_trajectories()
    _, rho, gradient = reference_step(tiny, trajectories)
    metrics, ours = run_step(tiny, register(tiny, VCPOConfig(tokens_per_micro_batch=60)), trajectories)
    assert metrics["rho"] == pytest.approx(rho, rel=1e-5)
    torch.testing.assert_close(ours, gradient.float(), rtol=5e-4, atol=5e-7)


def detached_loss(inputs):
    from megatron_vcpo.objective import LossOutputs

    return LossOutputs(loss=inputs.policy_logprobs.detach().sum(), metrics={})


def test_frozen_embeddings_under_full_recomputation_are_refused(groups):
    """Megatron's checkpointing would train neither the layers nor say so."""
    tiny = build_tiny_gpt(groups)
    tiny.model[0].module.embedding.requires_grad_(False)
    register(tiny, VCPOConfig())
    tiny = build_tiny_gpt(groups)
    tiny.config.recompute_granularity = "full"
    register(tiny, VCPOConfig())
    tiny = build_tiny_gpt(groups)
    tiny.config.recompute_granularity = "full"
    tiny.model[0].module.embedding.requires_grad_(False)
    with pytest.raises(ConfigError, match="embeddings are frozen"):
        register(tiny, VCPOConfig())


def test_a_loss_that_would_train_nothing_is_refused(groups):
    from megatron_vcpo.config import ConfigError

    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, VCPOConfig())
    vcpo.loss = detached_loss
    with pytest.raises(ConfigError, match="attached to the graph"):
        run_step(tiny, vcpo, make_trajectories())


def test_vetoes_and_fallbacks_are_shares_of_all_trajectories_however_the_minibatch_is_packed(groups):
    """Counts are these shares times N; the first group is rejected, one of the second left, one of the third vetoed."""
    batch = []
    for t in make_trajectories(count=12):
        rejected = t.group_id == 0 or (t.group_id == 1 and t.index > 0)
        behavior = t.behavior_logprobs.copy()
        if t.group_id == 2 and t.index == 0:
            behavior[0] = 20.0
        batch.append(dataclasses.replace(t, behavior_logprobs=behavior, reward=np.nan if rejected else t.reward))
    for budget in (24, 96, 400):
        tiny = build_tiny_gpt(groups)
        config = VCPOConfig(
            correction="none", baseline="opob-leave-one-out", veto_ratio=1e-6, tokens_per_micro_batch=budget
        )
        metrics, _ = run_step(tiny, register(tiny, config), batch)
        counts = {name: 12 * metrics[name] for name in ("vetoed", "baseline_fallbacks", "nonfinite_trajectories")}
        # The one that is alone in its group has no others to take a baseline from.
        assert counts == pytest.approx({"vetoed": 1, "baseline_fallbacks": 1, "nonfinite_trajectories": 7}), budget


def centred(inputs):
    """Group means subtracted, divided by the population standard deviation, as group-std does."""
    values = torch.zeros_like(inputs.rewards)
    for group in inputs.group_ids.unique():
        mine = inputs.group_ids == group
        std = inputs.rewards[mine].std(unbiased=False)
        values[mine] = (inputs.rewards[mine] - inputs.rewards[mine].mean()) / (std if std > 0 else 1.0)
    return values


@pytest.mark.parametrize("budget", [SEQUENCE * 4, 24], ids=["one", "groups-split"])
def test_advantages_of_ones_own_give_the_same_step_however_groups_are_packed(groups, budget):
    found = []
    for changes in (
        {"baseline": "mean"},
        {"baseline": "none", "reward_normalization": "none", "advantages": "tests.mcore.test_policy_step:centred"},
    ):
        tiny = build_tiny_gpt(groups)
        vcpo = register(tiny, VCPOConfig(tokens_per_micro_batch=budget, **changes))
        found.append(run_step(tiny, vcpo, make_trajectories()))
    (metrics, gradient), (own_metrics, own_gradient) = found
    torch.testing.assert_close(own_gradient, gradient, rtol=1e-4, atol=1e-7)
    assert own_metrics["advantage_abs"] == pytest.approx(metrics["advantage_abs"], rel=1e-6)
    assert own_metrics["rho"] == metrics["rho"]


def test_advantages_are_asked_for_the_steps_minibatch_alone_and_never_for_an_empty_one(groups):
    asked = []

    def noted(inputs):
        asked.append(len(inputs.rewards))
        return inputs.rewards

    from megatron.core.pipeline_parallel import get_forward_backward_func

    tiny, batch = build_tiny_gpt(groups), make_trajectories()
    vcpo = register(tiny, VCPOConfig(baseline="none", reward_normalization="none"))
    vcpo.advantages = noted
    vcpo.logprobs_of(batch[:3], model=tiny.model, forward_backward=get_forward_backward_func())
    assert asked == []
    run_step(tiny, vcpo, batch)
    metrics, _ = run_step(tiny, vcpo, [])
    assert asked == [len(batch)]
    assert metrics["skipped"] == 1.0


def test_advantages_that_raise_are_one_sentence(groups):
    tiny = build_tiny_gpt(groups)
    none = {"baseline": "none", "reward_normalization": "none", "advantages": "tests.mcore.test_policy_step:centred"}
    vcpo = register(tiny, VCPOConfig(**none))
    vcpo.advantages = lambda inputs: inputs.rewards.view(-1, 5)
    with pytest.raises(ConfigError, match=r"--vcpo-advantages tests\.mcore.*:centred raised RuntimeError: shape"):
        run_step(tiny, vcpo, make_trajectories())
