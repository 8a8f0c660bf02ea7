"""Exact energies in a step: three ways to one gradient, in fp64 against an independent computation."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_vcpo.config import ConfigError, VCPOConfig
from tests.oracle.energies import measure, per_trajectory_energies
from tests.oracle.layouts import VOCAB, Layout, Policy, build, trajectories
from tests.oracle.single_process import single_process_megatron

pytestmark = pytest.mark.slow

METHODS = ("two-pass", "deferred", "accumulators")
MINIBATCH = {"baseline_scope": "minibatch", "reward_normalization": "minibatch-std"}


@pytest.fixture(autouse=True, scope="module")
def megatron():
    with single_process_megatron() as groups:
        yield groups


def make(method, *, moe=False, tied=False, dtype=torch.float64, transformer=None, **settings):
    config = VCPOConfig(energy="exact", energy_method=method, tokens_per_micro_batch=60, **settings)
    config.validate()
    policy = Policy(
        config=config,
        moe=moe,
        tied=tied,
        dtype=dtype,
        optimizer={"clip_grad": 0.0, "initial_loss_scale": 2.0**4},
        transformer=transformer or {},
    )
    return build(policy, Layout())


def gradients(trainer):
    return torch.cat([p.main_grad.flatten() for chunk in trainer.model for p in chunk.parameters()])


def expected_step(trainer, batch, *, minibatch):
    """Sequence TIS, token mean of sequences, OPOB from autograd's energies: (gradient, baselines)."""
    energy = per_trajectory_energies(trainer.model[0], batch, vocab_size=VOCAB).sum(0)
    gpt = trainer.model[0].module.eval()
    sums, lam, length = [], [], []
    for t in batch:
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids])).long()
        mask = torch.triu(torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool), 1)
        first = len(t.prompt_ids)
        logits = gpt(ids[None], torch.arange(len(ids))[None], mask)[0, first - 1 : -1, :VOCAB]
        p = torch.log_softmax(logits, -1).gather(1, ids[first:, None])[:, 0]
        on = torch.from_numpy(t.response_mask)
        sums.append((p * on).sum())
        lam.append(((p.detach() - torch.from_numpy(t.behavior_logprobs).double()) * on).sum())
        length.append(max(int(on.sum()), 1))
    gpt.train()
    lam, length = torch.stack(lam), torch.tensor(length).double()
    weight, rewards = lam.exp().clamp(max=8.0), torch.tensor([t.reward for t in batch]).double()
    e = (weight / length) ** 2 * energy
    scope = torch.tensor([0 if minibatch else t.group_id for t in batch])
    baseline, scale = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for g in scope.unique():
        m = scope == g
        baseline[m] = (e[m] * rewards[m]).sum() / e[m].sum() if e[m].sum() > 0 else rewards[m].mean()
        std = rewards[m].std(unbiased=False)
        scale[m] = 1.0 / std if std > 0 else 0.0
    # Megatron divides by the rows of all micro-batches, by which the loss was multiplied.
    loss = -(weight * (rewards - baseline) * scale / length * torch.stack(sums)).mean()
    parameters = [p for chunk in trainer.model for p in chunk.parameters()]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]), baseline


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("two-pass", {}),
        ("deferred", {}),
        ("two-pass", MINIBATCH),
        ("deferred", MINIBATCH),
        ("accumulators", MINIBATCH),
    ],
    ids=["two-pass", "deferred", "two-pass-minibatch", "deferred-minibatch", "accumulators-minibatch"],
)
def test_every_way_gives_the_gradient_with_the_baseline_of_autograds_energies(method, settings, moe):
    trainer, batch = make(method, moe=moe, tied=not moe, **settings), trajectories()
    expected, baseline = expected_step(trainer, batch, minibatch=bool(settings))
    metrics = trainer.train(batch)
    assert metrics["n_micro_batches"] > 2
    assert metrics["skipped"] == 0.0
    assert metrics["baseline"] == pytest.approx(float(baseline.mean()), rel=1e-10, abs=1e-10)
    error = float((gradients(trainer) - expected).norm() / expected.norm())
    assert error < 1e-6, error  # rewards' scales are fp32
    assert float(expected.norm()) > 1e-2


AUXILIARY = {
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],  # the global one keeps counts between passes
    "moe_aux_loss_coeff": [0.05, 0.05],
    "moe_z_loss_coeff": 0.01,
}


@pytest.fixture(scope="module")
def with_penalties():
    """Two steps of every way, with KL, entropy and auxiliary losses: (metrics, gradients)."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    destroy_moe_metrics_tracker()  # it remembers how many layers another test's model had
    results = {}
    for method in METHODS:
        settings = {**MINIBATCH, "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
        trainer = make(method, moe=True, transformer=AUXILIARY, **settings)
        steps = []
        for seed in (0, 1):
            metrics = trainer.train(trajectories(seed))
            steps.append((metrics, gradients(trainer)))
        results[method] = steps
    return results


@pytest.mark.parametrize("method", METHODS[1:])
def test_penalties_and_auxiliary_losses_are_the_same_in_every_way(with_penalties, method):
    for ours, theirs in zip(with_penalties[method], with_penalties["two-pass"]):
        assert ours[0].keys() == theirs[0].keys()
        for name in ours[0]:
            assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-6, abs=1e-9), name
        assert float((ours[1] - theirs[1]).norm() / theirs[1].norm()) < 1e-6
    assert with_penalties["two-pass"][1][0]["kl"] > 1e-6


def test_a_measuring_pass_beside_the_steps_own_moves_no_count_of_the_routers():
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker

    destroy_moe_metrics_tracker()
    trainer, batch = make("two-pass", moe=True, transformer=AUXILIARY), trajectories()

    def counts():
        buffers = [b.flatten() for n, b in trainer.model[0].named_buffers() if ".router." in n]
        logged = [entry.values for entry in get_moe_metrics_tracker().metrics.values()]
        return torch.cat([*buffers, *logged]).double()

    trainer.step.begin(batch, model=trainer.model, forward_backward=get_forward_backward_func())
    assert not counts().any()
    measure(trainer.step.energies.energies, batch, packing=trainer.step.settings.packing, vocab_size=VOCAB)
    assert counts().any()  # they would have moved


def test_energies_hold_the_weights_of_a_token_level_correction_and_the_veto():
    trainer = make("two-pass", correction="token-tis", correction_upper=1.1, veto_ratio=0.01)
    energies, batch = trainer.step.energies.energies, trajectories()
    low = batch[0].behavior_logprobs.copy()
    low[0] += 9.0
    batch[0] = dataclasses.replace(batch[0], behavior_logprobs=low, response_mask=np.ones_like(batch[0].response_mask))
    found = measure(energies, batch, packing=trainer.step.settings.packing, vocab_size=VOCAB)
    ratios = []

    def weights(p, beta):
        ratios.append((p - beta).exp())
        return ratios[-1].clamp(max=1.1)

    expected = per_trajectory_energies(trainer.model[0], batch, vocab_size=VOCAB, token_weights=weights).sum(0)
    nonempty = [i for i, t in enumerate(batch) if t.response_mask.any()]
    vetoed = [i for i, r in zip(nonempty, ratios) if (r[torch.from_numpy(batch[i].response_mask)] < 0.01).any()]
    assert 0 in vetoed
    expected[vetoed] = 0.0
    torch.testing.assert_close(found.energies, expected, rtol=1e-11, atol=0)
    assert (torch.cat(ratios) > 1.1).any()
    assert (found.energies > 0).sum() >= 3


@pytest.mark.parametrize("method", METHODS)
def test_a_trajectory_that_is_not_finite_is_left_out_and_counted(method):
    trainer = make(method, **MINIBATCH)
    batch = trajectories()
    broken = dataclasses.replace(batch[0], behavior_logprobs=np.full_like(batch[0].behavior_logprobs, np.nan))
    metrics = trainer.train([broken, *batch[1:]])
    whole = gradients(trainer)
    assert metrics["skipped"] == 0.0
    assert metrics["nonfinite_trajectories"] == pytest.approx(1 / 13)
    assert torch.isfinite(whole).all()
    assert float(whole.norm()) > 1e-2


def test_energies_do_not_depend_on_the_loss_scale():
    found = []
    for scale in (1.0, 2.0**6):
        trainer = make("two-pass", dtype=torch.float16)
        trainer.optimizer.chained_optimizers[0].grad_scaler._scale.fill_(scale)
        energies = trainer.step.energies.energies
        found.append(measure(energies, trajectories(), packing=trainer.step.settings.packing, vocab_size=VOCAB))
    full = make("two-pass")
    expected = per_trajectory_energies(full.model[0], trajectories(), vocab_size=VOCAB).sum(0)
    for scaled in found:
        torch.testing.assert_close(scaled.energies, expected, rtol=0.05, atol=0)
    torch.testing.assert_close(found[0].energies, found[1].energies, rtol=0.01, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_fp16_steps_run_in_every_way_and_an_overflow_is_a_skipped_step(method):
    trainer = make(method, dtype=torch.float16, **MINIBATCH)
    assert trainer.train(trajectories())["skipped"] == 0.0
    trainer.optimizer.chained_optimizers[0].grad_scaler._scale.fill_(1e30)
    assert trainer.train(trajectories())["skipped"] == 1.0


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"energy_method": "accumulators"}, "--vcpo-baseline-scope minibatch"),
        ({"energy_method": "accumulators", "baseline": "opob-leave-one-out", **MINIBATCH}, "--vcpo-baseline opob"),
        ({"energy_method": "deferred", "correction": "gspo"}, "two-pass"),
        ({"energy_method": "deferred", "loss": "somewhere:loss"}, "two-pass"),
    ],
)
def test_what_cannot_work_is_refused(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        VCPOConfig(energy="exact", **settings).validate()


def test_a_trainable_parameter_without_a_rule_is_an_error_before_anything_runs():
    from megatron_vcpo.mcore.energies.exact import ExactEnergies

    trainer = make("two-pass")
    trainer.model[0].module.decoder.layers[0].register_parameter("stray", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(ConfigError, match=r"no rule for the parameters module\.decoder\.layers\.0\.stray"):
        ExactEnergies(trainer.model, trainer.groups, trainer.policy.config, torch.device("cpu"))


def test_a_setting_that_would_make_energies_wrong_is_refused():
    with pytest.raises(ConfigError, match="--recompute-modules mlp"):
        make("two-pass", transformer={"recompute_granularity": "selective", "recompute_modules": ["mlp"]})


def test_replayed_routes_are_followed_in_every_pass_and_their_books_balance(megatron):
    from tests.mcore.test_policy_step import register, run_step
    from tests.mcore.test_router_replay import MOE, routed
    from tests.oracle.tiny_gpt import build_tiny_gpt

    results = []
    for method in METHODS:
        tiny = build_tiny_gpt(megatron, size=MOE)
        config = VCPOConfig(
            energy="exact", energy_method=method, tokens_per_micro_batch=48, kl_coefficient=0.1, **MINIBATCH
        )
        vcpo = register(tiny, config, router_replay=True)
        results.append([run_step(tiny, vcpo, routed(seed)) for seed in (0, 1)])
    for ours in results[1:]:
        for (metrics, gradient), (expected, expected_gradient) in zip(ours, results[0]):
            assert metrics["route_missing"] == expected["route_missing"]
            assert metrics["baseline"] == pytest.approx(expected["baseline"], rel=1e-4)
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=4e-6)  # fp32 sums, other order


@pytest.mark.parametrize("method", ["two-pass", "deferred"])
def test_an_overflow_of_the_measuring_pass_alone_skips_the_step_and_lowers_the_scale(method):
    """Tiny advantages: the step's own backward stays finite at a loss scale at which the measuring one overflows."""

    def policy(**energy):
        config = VCPOConfig(tokens_per_micro_batch=400, reward_normalization="none", **energy)
        return Policy(config=config, dtype=torch.float16, optimizer={"initial_loss_scale": 2.0**40, "hysteresis": 1})

    tiny = [dataclasses.replace(t, reward=t.reward * 2.0**-40) for t in trajectories(0)]
    assert build(policy(), Layout()).train(tiny)["skipped"] == 0.0
    trainer = build(policy(energy="exact", energy_method=method), Layout())
    before = {name: value.clone() for name, value in trainer.weights().items()}
    metrics = trainer.train(tiny)
    assert metrics["skipped"] == 1.0
    assert all(torch.equal(value, before[name]) for name, value in trainer.weights().items())
    assert float(trainer.optimizer.get_loss_scale()) == 2.0**39
