"""Routing replay on the real Megatron-Core, one process, against independent computations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.mcore.packing import RowAlignment, build_micro_batch
from megatron_vcpo.mcore.routers.accounting import recorded_routes, route_metrics
from megatron_vcpo.mcore.routers.replay import ReplayError, RouterReplay, RouteSheet, refuse_unreplayable
from tests.mcore.test_policy_step import make_trajectories, register, run_step
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import Size, build_tiny_gpt
from tests.oracle.trajectories import trajectory

EXPERTS, TOPK = 4, 2
MOE = Size(experts=EXPERTS)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def groups():
    with single_process_megatron() as collection:
        yield collection


def routed(seed=0, layers=2, missing=0.2, **kwargs):
    """Trajectories with random routes: pairs of different experts, some rows missing, the last always."""
    rng = np.random.default_rng(seed + 100)
    out = []
    for t in make_trajectories(seed, **kwargs):
        routes = np.argsort(rng.random((t.num_tokens, layers, EXPERTS)), -1)[..., :TOPK].astype(np.uint8)
        routes[rng.random(t.num_tokens) < missing] = 255
        routes[-1] = 255
        out.append(with_routes(t, routes))
    return out


def with_routes(t, routes):
    return type(t)(**{name: getattr(t, name) for name in t.__slots__} | {"routed_experts": routes})


def sheet_of(routes: torch.Tensor, layers: int = 1) -> RouteSheet:
    micro = build_micro_batch([trajectory()], (0,), alignment=RowAlignment(), device=CPU)
    return RouteSheet(micro_batch=micro, rows=torch.arange(len(routes)), routes=routes, layers=frozenset(range(layers)))


# ------------------------------------------------------------------ gates and gradients


def plain_moe(x, weight, experts, routes, bias, *, score, pre, scale):
    """A mixture of experts in fp64 with forced routes, token by token and expert by expert; gradients by autograd."""
    logits = x @ weight.T
    rows = []
    for t in range(len(x)):
        scores = torch.softmax(logits[t], 0) if pre else logits[t]
        if score == "sigmoid":
            scores = torch.sigmoid(logits[t])
        chosen = routes[t]
        if chosen[0] < 0:  # the router's own, where the bias decides but is no part of the gates
            chosen = (scores + bias).topk(TOPK).indices.tolist()
        gates = torch.stack([scores[e] for e in chosen])
        if score == "sigmoid":
            gates = gates / gates.sum()
        elif not pre:
            gates = torch.exp(gates) / torch.exp(gates).sum()
        out = torch.zeros_like(x[t])
        for gate, e in zip(gates * scale, chosen):
            first, second = experts[e]
            up = first @ x[t]
            half = len(up) // 2
            out = out + gate * (second @ (F.silu(up[:half]) * up[half:]))
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("fields", "score", "pre", "scale"),
    [
        ({}, "softmax", False, 1.0),
        ({"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5}, "softmax", True, 1.5),
        (
            {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 2.5,
            },
            "sigmoid",
            False,
            2.5,
        ),
    ],
)
def test_gates_come_from_the_own_logits_over_the_replayed_experts_and_gradients_reach_the_router(
    groups, fields, score, pre, scale
):
    tiny = build_tiny_gpt(groups, size=MOE, **fields)
    replay = RouterReplay(tiny.model, groups)
    assert replay.layer_numbers == [1, 2]
    moe = tiny.model[0].module.decoder.layers[0].mlp
    router, rows = moe.router, 9
    bias = torch.tensor([0.0, 0.4, -0.4, 0.1])
    if router.expert_bias is not None:
        router.expert_bias.copy_(bias)
    torch.manual_seed(3)
    x = torch.randn(rows, 1, MOE.hidden, requires_grad=True)
    routes = torch.tensor([[0, 1], [3, 2], [-1, -1], [1, 3], [2, 0], [0, 3], [1, 2], [-1, -1], [3, 1]])
    sheet = sheet_of(routes[:, None].to(torch.int16))
    with router.router_replay.reading(sheet):
        out, _ = moe(x)
    direction = torch.randn(out.shape)
    out.backward(direction)

    x64 = x.detach()[:, 0].double().requires_grad_()
    weight64 = router.weight.detach().double().requires_grad_()
    experts = [
        (e.linear_fc1.weight.detach().double(), e.linear_fc2.weight.detach().double())
        for e in moe.experts.local_experts
    ]
    used_bias = bias.double() if router.expert_bias is not None else torch.zeros(EXPERTS, dtype=torch.float64)
    expected = plain_moe(x64, weight64, experts, routes.tolist(), used_bias, score=score, pre=pre, scale=scale)
    (expected * direction[:, 0].double()).sum().backward()
    assert torch.allclose(out[:, 0].double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.allclose(x.grad[:, 0].double(), x64.grad, rtol=1e-4, atol=1e-7)
    gradient = router.weight.main_grad if router.weight.grad is None else router.weight.grad
    assert weight64.grad.abs().max() > 1e-4
    assert torch.allclose(gradient.double(), weight64.grad, rtol=1e-4, atol=1e-7)
    assert sheet.reads == sheet.gradient_reads == {0: 1}


# ------------------------------------------------------------------ alignment


def test_the_router_sees_each_tokens_own_routes_in_a_packed_micro_batch(groups):
    """By hand: two trajectories of 2 + 3 and 1 + 2 tokens. Token t of the first goes to {t, t + 1} modulo 4 in every
    layer, the second's tokens to {l, l + 2} in layer l, but for its first, which has no routes."""
    first = np.array([[[t % 4, (t + 1) % 4] for _ in range(2)] for t in range(5)], np.uint8)
    second = np.array([[[layer, layer + 2] for layer in range(2)] for _ in range(3)], np.int16)
    second[0] = -1
    batch = [
        trajectory(routed_experts=first, prompt_ids=np.array([5, 6], np.int32)),
        trajectory(
            routed_experts=second,
            prompt_ids=np.array([9], np.int32),
            response_ids=np.array([3, 4], np.int32),
            behavior_logprobs=np.array([-1, -2], np.float32),
            versions=np.zeros(2, np.int32),
            response_mask=np.ones(2, bool),
            group_id=1,
        ),
    ]
    tiny = build_tiny_gpt(groups, size=MOE)
    vcpo = register(tiny, VCPOConfig(baseline="none", reward_normalization="none"), router_replay=True)
    seen = {}

    def look(layer):
        def hook(_module, _inputs, output):
            seen.setdefault(layer, []).append(output[1])

        return hook

    for layer, block in enumerate(tiny.model[0].module.decoder.layers):
        block.mlp.router.register_forward_hook(look(layer))
    metrics, _ = run_step(tiny, vcpo, batch)
    assert sorted(seen) == [0, 1]
    for layer, (chosen,) in seen.items():
        experts = [set(row.nonzero()[:, 0].tolist()) for row in chosen]
        assert experts[:5] == [{t % 4, (t + 1) % 4} for t in range(5)]
        assert len(experts[5]) == TOPK
        assert experts[6:8] == [{layer, layer + 2}] * 2
    assert metrics["route_missing"] == pytest.approx(1 / 6)  # of 4 + 2 tokens that have a token after them


# ------------------------------------------------------------------ recomputation


def gradient_of(groups, trajectories, budget, **fields):
    tiny = build_tiny_gpt(groups, size=MOE, **fields)
    vcpo = register(tiny, VCPOConfig(tokens_per_micro_batch=budget), router_replay=True)
    metrics, gradient = run_step(tiny, vcpo, trajectories)
    return metrics, gradient


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    ids=["full", "half of the layers", "the experts alone"],
)
def test_recomputed_layers_read_their_own_micro_batch_again(groups, fields):
    batch = routed()
    plain, expected = gradient_of(groups, batch, 48)
    assert plain["n_micro_batches"] > 1
    metrics, gradient = gradient_of(groups, batch, 48, **fields)
    assert torch.equal(gradient, expected)
    assert {k: v for k, v in metrics.items() if v == v} == {k: v for k, v in plain.items() if v == v}


def test_another_split_into_micro_batches_gives_the_same_gradient_and_other_routes_another(groups):
    batch = routed()
    metrics, expected = gradient_of(groups, batch, 48)
    together, gradient = gradient_of(groups, batch, 400)
    assert together["n_micro_batches"] == 1
    assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    for name in metrics:
        if name.startswith("route_"):
            assert together[name] == pytest.approx(metrics[name], abs=1e-12), name
    other = [with_routes(t, np.roll(t.routed_experts, 1, 0)) for t in batch]
    _, changed = gradient_of(groups, other, 48)
    assert (changed - expected).abs().max() > 1e-3


# ------------------------------------------------------------------ metrics and recording


def record(tiny, vcpo, batch):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with vcpo.replay.recording():
        vcpo.logprobs_of(batch, model=tiny.model, forward_backward=get_forward_backward_func())
    return recorded_routes(vcpo.replay, batch, EXPERTS)


def test_what_a_pass_recorded_is_what_the_router_does_when_left_alone(groups):
    batch = make_trajectories()
    alone = build_tiny_gpt(groups, size=MOE)
    expected_metrics, expected = run_step(alone, register(alone, VCPOConfig(tokens_per_micro_batch=48)), batch)
    tiny = build_tiny_gpt(groups, size=MOE)
    vcpo = register(tiny, VCPOConfig(tokens_per_micro_batch=48), router_replay=True)
    routes = record(tiny, vcpo, batch)
    assert sorted(routes) == list(range(len(batch)))
    assert all(r.dtype == np.uint8 and r.max() < EXPERTS for r in routes.values())
    replayed, gradient = run_step(tiny, vcpo, [with_routes(t, routes[i]) for i, t in enumerate(batch)])
    assert torch.equal(gradient, expected)
    assert replayed["route_disagree_tokens"] == 0.0
    assert replayed["route_agreement/layer_0"] == replayed["route_agreement/layer_1"] == 1.0
    assert replayed["rho"] == expected_metrics["rho"]


def test_agreement_counts_the_tokens_whose_experts_were_changed(groups):
    batch = make_trajectories()
    tiny = build_tiny_gpt(groups, size=MOE)
    vcpo = register(tiny, VCPOConfig(tokens_per_micro_batch=48), router_replay=True)
    routes = record(tiny, vcpo, batch)
    rng = np.random.default_rng(1)
    tokens = changed = absent = 0
    altered = []
    for i, t in enumerate(batch):
        new = routes[i].copy()
        for row in range(len(new)):
            fate = rng.random()
            if fate < 0.2:  # in the last layer: nothing behind it changes its mind
                new[row, 1] = [e for e in range(EXPERTS) if e not in new[row, 1]]
                changed += 1
            elif fate < 0.3:
                new[row, 1] = new[row, 1, ::-1]  # another order is the same choice
            elif fate < 0.45 and row < len(new) - 1:
                new[row] = 255
                absent += 1
                continue
            tokens += 1
        altered.append(with_routes(t, new))
    metrics, _ = run_step(tiny, vcpo, altered)
    assert metrics["route_agreement/layer_0"] == 1.0
    assert metrics["route_agreement/layer_1"] == pytest.approx(1 - changed / tokens)
    assert metrics["route_disagree_tokens"] == pytest.approx(changed / tokens)
    assert metrics["route_missing"] == pytest.approx(absent / sum(t.num_tokens - 1 for t in batch))


# ------------------------------------------------------------------ nothing goes wrong in silence


def test_routes_that_no_layer_read_end_the_run(groups):
    from megatron.core.packed_seq_params import PackedSeqParams

    tiny = build_tiny_gpt(groups, size=MOE)
    replay = RouterReplay(tiny.model, groups)
    micro = build_micro_batch(routed(), (0, 1), alignment=RowAlignment(), device=CPU)
    packed = PackedSeqParams()
    replay.attach(packed, micro, tiny.model[0])
    with pytest.raises(ReplayError, match=r"Layer 0 .* micro-batch 0 0 times, 0 of them with a gradient where 1"):
        replay.finish_pass(training=True)
    replay.attach(packed, micro, tiny.model[0])
    sheet = packed.route_sheet
    own = torch.zeros(len(sheet.rows), TOPK, dtype=torch.int64)
    for layer in (0, 1, 1):
        sheet.choose(layer, own)
    with pytest.raises(ReplayError, match=r"Layer 1 .* 2 times, 2 of them with a gradient where 1"):
        replay.finish_pass(training=True)


def test_routes_of_another_model_or_number_of_tokens_are_refused(groups):
    from megatron.core.packed_seq_params import PackedSeqParams

    tiny = build_tiny_gpt(groups, size=MOE)
    vcpo = register(tiny, VCPOConfig(), router_replay=True)
    micro = build_micro_batch(routed(layers=3), (0, 1), alignment=RowAlignment(), device=CPU)
    with pytest.raises(ReplayError, match=r"name 2 experts in 3 layers, the model routes to 2 in 2"):
        vcpo.replay.attach(PackedSeqParams(), micro, tiny.model[0])
    with pytest.raises(ReplayError, match="routes 3 tokens of a micro-batch with routes for 4"):
        sheet_of(torch.zeros(4, 1, 2, dtype=torch.int16)).choose(0, torch.zeros(3, 2, dtype=torch.int64))
    bare = make_trajectories()
    with pytest.raises(ReplayError, match="group 0 response 0 carries no routes"):
        run_step(tiny, vcpo, bare)


def test_a_dense_model_and_settings_that_bypass_the_seam_are_refused(groups):
    dense = build_tiny_gpt(groups)
    with pytest.raises(ConfigError, match="--num-experts"):
        RouterReplay(dense.model, groups)
    config = build_tiny_gpt(groups, size=MOE).config
    for field, value, flag in (
        ("moe_router_fusion", True, "--moe-router-fusion"),
        ("moe_router_load_balancing_type", "sinkhorn", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"], "quantile_balancing"),
        ("moe_expert_capacity_factor", 1.0, "--moe-expert-capacity-factor"),
        ("overlap_moe_expert_parallel_comm", True, "--overlap-moe-expert-parallel-comm"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl"),
    ):
        before = getattr(config, field)
        setattr(config, field, value)
        with pytest.raises(ConfigError, match=flag):
            refuse_unreplayable(config)
        setattr(config, field, before)
    refuse_unreplayable(config)


def test_metrics_of_a_pass_without_replayed_rows_hold_no_agreement(groups):
    tiny = build_tiny_gpt(groups, size=MOE)
    vcpo = register(tiny, VCPOConfig(), router_replay=True)
    batch = routed(missing=1.0)
    metrics, _ = run_step(tiny, vcpo, batch)
    assert metrics["route_missing"] == 1.0
    assert metrics["route_disagree_tokens"] == 0.0
    assert not any(name.startswith("route_agreement") for name in metrics)
    assert route_metrics(vcpo.replay, batch, CPU)["route_missing"] == 1.0
