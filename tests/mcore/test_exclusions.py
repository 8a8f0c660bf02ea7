"""A trajectory with anything that is not finite: the step is, in every number, the step that never had it."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from megatron_vcpo.config import VCPOConfig
from tests.mcore.test_policy_step import make_trajectories, register, run_step
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import SEQUENCE, Size, build_tiny_gpt

BROKEN = 3
SHARES = ("nonfinite_trajectories", "n_trajectories", "vetoed", "baseline_fallbacks")
MARKER = 63
"""A token that only the broken trajectory holds: the spoilt model gives no finite log-prob where it reads it."""

CONFIGS = {
    "defaults": {},
    "scored first": {"tokens_per_micro_batch": 24},
    "one baseline": {"baseline_scope": "minibatch", "reward_normalization": "minibatch-std"},
    "opob leave-one-out": {"baseline": "opob-leave-one-out", "reward_normalization": "none"},
    "mean": {"baseline": "mean", "reward_normalization": "none"},
    "leave-one-out": {"baseline": "leave-one-out", "reward_normalization": "none"},
    "group std alone": {"baseline": "none", "reward_normalization": "group-std"},
    "token mean": {"baseline": "none", "reward_normalization": "none", "aggregation": "token-mean"},
    "token sum": {"baseline": "mean", "aggregation": "seq-mean-token-sum"},
    "exact": {"energy": "exact"},
    "exact, two passes": {"energy": "exact", "energy_method": "two-pass", "tokens_per_micro_batch": 24},
    "exact, accumulators": {
        "energy": "exact",
        "energy_method": "accumulators",
        "baseline_scope": "minibatch",
        "reward_normalization": "none",
    },
    "penalties": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
}


@pytest.fixture(scope="module")
def groups():
    with single_process_megatron() as collection:
        yield collection


def minibatch():
    """Eight trajectories of different rewards; the broken one alone holds MARKER, in the middle of its response."""
    out = []
    for i, t in enumerate(make_trajectories(count=8)):
        prompt, response = np.minimum(t.prompt_ids, MARKER - 1), np.minimum(t.response_ids, MARKER - 1)
        if i == BROKEN:
            response[len(response) // 2 - 1] = MARKER
        out.append(dataclasses.replace(t, prompt_ids=prompt, response_ids=response, reward=float(i * i % 7)))
    return out


def spoil(tiny, *, when=lambda: True):
    """Let the model compute NaN in the rows that read MARKER, with weights that are sound."""
    gpt = tiny.model[0].module
    seen = {}
    gpt.register_forward_pre_hook(lambda module, args, kwargs: seen.update(tokens=args[0]), with_kwargs=True)

    def after(module, args, hidden):
        rows = (seen["tokens"][0] == MARKER)[:, None, None]
        return hidden.masked_fill(rows, math.nan) if when() else hidden

    gpt.decoder.final_layernorm.register_forward_hook(after)


def spoilt(batch, what):
    trajectory = batch[BROKEN]
    if what == "reward":
        return dataclasses.replace(trajectory, reward=math.inf)
    logprobs = trajectory.behavior_logprobs.copy()
    logprobs[-1] = {"nan": np.nan, "-inf": -np.inf}[what]
    return dataclasses.replace(trajectory, behavior_logprobs=logprobs)


def assert_equal_steps(found, expected, *, of):
    (metrics, gradient), (wanted, clean) = found, expected
    assert metrics["skipped"] == 0.0
    assert metrics["nonfinite_trajectories"] == 1 / of
    assert metrics["n_trajectories"] == of
    assert {k: v for k, v in metrics.items() if k not in SHARES} == {k: v for k, v in wanted.items() if k not in SHARES}
    assert torch.equal(gradient, clean)
    assert float(clean.norm()) > 1e-3


@pytest.mark.parametrize("what", ["nan", "-inf", "reward", "policy"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_step_is_the_one_without_it(groups, name, what):
    config = {"tokens_per_micro_batch": SEQUENCE * 4, **CONFIGS[name]}
    batch = minibatch()
    tiny = build_tiny_gpt(groups)
    expected = run_step(tiny, register(tiny, VCPOConfig(**config)), [t for i, t in enumerate(batch) if i != BROKEN])
    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, VCPOConfig(**config))
    if what == "policy":
        spoil(tiny)
    else:
        batch[BROKEN] = spoilt(batch, what)
    assert_equal_steps(run_step(tiny, vcpo, batch), expected, of=8)
    assert vcpo.excluded == {BROKEN}


def test_a_reference_that_is_not_finite_takes_its_trajectory_out_before_the_step(groups):
    batch, config = minibatch(), VCPOConfig(kl_coefficient=0.1, baseline="mean")
    tiny = build_tiny_gpt(groups)
    expected = run_step(tiny, register(tiny, config), [t for i, t in enumerate(batch) if i != BROKEN])
    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, config)
    spoil(tiny, when=lambda: not torch.is_grad_enabled())  # the pass over the reference takes no gradient
    assert_equal_steps(run_step(tiny, vcpo, batch), expected, of=8)


@pytest.mark.parametrize("what", ["nan", "policy"])
def test_auxiliary_losses_of_experts_and_their_counts_do_not_see_it(groups, what):
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker

    routers = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
    found, logged = [], []
    for whole in (False, True):
        destroy_moe_metrics_tracker()
        batch = minibatch()
        tiny = build_tiny_gpt(groups, size=Size(experts=4), **routers)
        vcpo = register(tiny, VCPOConfig(tokens_per_micro_batch=SEQUENCE * 4))
        if not whole:
            del batch[BROKEN]
        elif what == "policy":
            spoil(tiny)
        else:
            batch[BROKEN] = spoilt(batch, what)
        found.append(run_step(tiny, vcpo, batch))
        logged.append({name: entry.values.tolist() for name, entry in get_moe_metrics_tracker().metrics.items()})
    assert_equal_steps(found[1], found[0], of=8)
    assert logged[1] == logged[0]
    assert set(logged[0]) == {"load_balancing_loss", "z_loss"}


def test_a_loop_that_does_not_repeat_skips_the_step_and_the_next_minibatch_begins_anew(groups):
    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, VCPOConfig(tokens_per_micro_batch=SEQUENCE * 4))
    spoil(tiny)
    before = tiny.parameters()
    metrics, _ = run_step(tiny, vcpo, minibatch(), repeat=False)
    assert metrics["skipped"] == 1.0
    assert vcpo.repeat
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters()))
    assert tiny.optimizer.param_groups[0]["lr"] == 1e-2
    metrics, _ = run_step(tiny, vcpo, make_trajectories(seed=5, count=4), repeat=False)
    assert vcpo.excluded == frozenset()


def test_where_every_pass_finds_more_the_step_is_skipped_with_a_reason(groups):
    """A device that computes NaN now here, now there: what would be left of the minibatch nobody chose."""
    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, VCPOConfig(tokens_per_micro_batch=SEQUENCE * 4))
    batch = minibatch()
    passes = []

    def after(module, args, hidden):
        passes.append(1)
        return torch.cat([hidden[:-2], hidden[-2:] * math.nan])  # whatever trajectory is the last

    tiny.model[0].module.decoder.final_layernorm.register_forward_hook(after)
    before = tiny.parameters()
    metrics, _ = run_step(tiny, vcpo, batch)
    assert metrics["skipped"] == 1.0
    assert "each pass found more" in vcpo.skip_reason
    assert len(passes) == 4
    assert metrics["nonfinite_trajectories"] == 4 / 8
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters()))


@pytest.mark.parametrize("budget", [SEQUENCE * 4, 24], ids=["found late", "found by scoring"])
def test_a_parameter_that_is_not_finite_ends_the_step_by_its_name_though_few_trajectories_meet_it(groups, budget):
    tiny = build_tiny_gpt(groups)
    vcpo = register(tiny, VCPOConfig(tokens_per_micro_batch=budget))
    with torch.no_grad():
        tiny.model[0].module.embedding.word_embeddings.weight[MARKER, 0] = math.nan
    metrics, _ = run_step(tiny, vcpo, minibatch())
    assert metrics["skipped"] == 1.0
    assert not vcpo.repeat
    assert vcpo.skip_reason.startswith("the parameter module.embedding.word_embeddings.weight on rank 0 is not finite")
