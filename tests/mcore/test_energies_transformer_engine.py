"""The rules of Transformer Engine's layers: on stand-ins with their interface here, on the real ones where a GPU is."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.energies.collector import KINDS, EnergyCollector, MicroBatchRows
from megatron_vcpo.mcore.energies.contributions import Products
from megatron_vcpo.mcore.energies.layout import EnergyLayout
from megatron_vcpo.mcore.energies.rows import Rows
from megatron_vcpo.mcore.energies.rules import norm
from megatron_vcpo.mcore.energies.transformer_engine import te_grouped_linear, te_layer_norm_linear, te_linear

IDS = np.array([0, 0, 0, 2, 2, 1, 1, 1, 1, 1, -1, -1])
WEIGHTS = np.array([0.5, 0.0, -2.0])


class Linear(torch.nn.Module):
    """te.pytorch.Linear, as TELinear wraps it."""

    def __init__(self, d_in, d_out, parallel_mode):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(d_out, d_in).double())
        self.bias = torch.nn.Parameter(torch.randn(d_out).double())
        self.parallel_mode, self.sequence_parallel = parallel_mode, False

    def forward(self, x):
        return F.linear(x, self.weight, self.bias), None


class LayerNormLinear(Linear):
    """te.pytorch.LayerNormLinear, as TELayerNormColumnParallelLinear wraps it."""

    def __init__(self, d_in, d_out, normalization, zero_centered_gamma):
        super().__init__(d_in, d_out, "column")
        self.normalization, self.zero_centered_gamma, self.eps = normalization, zero_centered_gamma, 1e-5
        self.layer_norm_weight = torch.nn.Parameter(torch.randn(d_in).double())
        rms = normalization == "RMSNorm"
        self.layer_norm_bias = None if rms else torch.nn.Parameter(torch.randn(d_in).double())

    def forward(self, x):
        scale = self.layer_norm_weight + (1.0 if self.zero_centered_gamma else 0.0)
        if self.normalization == "RMSNorm":
            x = F.rms_norm(x, x.shape[-1:], scale, self.eps)
        else:
            x = F.layer_norm(x, x.shape[-1:], scale, self.layer_norm_bias, self.eps)
        return F.linear(x, self.weight, self.bias), None


class GroupedLinear(torch.nn.Module):
    """te.pytorch.GroupedLinear, as TEGroupedLinear wraps it: rows stand expert by expert."""

    def __init__(self, d_in, d_out, experts):
        super().__init__()
        for i in range(experts):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.randn(d_out, d_in).double()))

    def forward(self, x, m_splits):
        parts = [F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(x.split(m_splits))]
        return torch.cat(parts), None


class RMSNorm(torch.nn.Module):
    """te.pytorch.RMSNorm."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.randn(width).double()), 1e-5

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def rows_of(ids):
    return Rows(ids=ids, device=torch.device("cpu"), members=np.arange(3))


def by_autograd(module, run, ids, trainable):
    """Energies [N], and sum_i WEIGHTS_i * gradient_i of every parameter that is trained."""
    energies, weighted = torch.zeros(3).double(), {}
    for i in range(3):
        grads = torch.autograd.grad(run(torch.from_numpy(ids == i)), list(module.parameters()), allow_unused=True)
        for (name, _), grad in zip(module.named_parameters(), grads):
            if grad is not None and name in trainable:
                energies[i] += grad.square().sum()
                weighted[name] = weighted.get(name, 0.0) + WEIGHTS[i] * grad
    return energies, weighted


def by_rule(rule, module, run, trainable, name="decoder.layers.0.mlp.layer", experts=None):
    """The same from one backward with frozen parameters."""
    undo, kept, everything = (
        [],
        [],
        EnergyLayout(tp=None, cp=None, tp_cp=None, pp=None, dp_cp=None, embd=None, experts=None),
    )
    collector = EnergyCollector(
        everything,
        num_trajectories=3,
        trainable=frozenset(id(p) for name, p in module.named_parameters() if name in trainable),
        tied=False,
        device=torch.device("cpu"),
        sink=lambda param, contribution: kept.append((param, contribution)),
        products=Products.SMALLER,
    )
    if experts is not None:
        collector.dispatched = experts
    names = {id(p): n for n, p in module.named_parameters()}
    module.requires_grad_(False)
    rule(collector, name, module, undo)
    owners = MicroBatchRows(rows=rows_of(IDS), scored=rows_of(IDS), tokens=torch.zeros(len(IDS), dtype=torch.long))
    with collector.micro_batch(owners):
        loss = run(torch.ones(len(IDS), dtype=torch.bool))
    loss.backward()
    module.requires_grad_(True)
    for restore in undo:
        restore()
    weighted = {}
    for param, contribution in kept:
        into = weighted.setdefault(names[id(param)], torch.zeros_like(param))
        contribution.add_gradient(into, WEIGHTS)
    return collector.table, weighted


def check(rule, module, forward, width, kinds, ids=IDS, trainable=None, **options):
    torch.manual_seed(0)
    trainable = trainable or [name for name, _ in module.named_parameters()]
    x = torch.randn(len(IDS), 1, width).double().requires_grad_()
    target = torch.randn(1000).double()

    def run(mask):
        out = forward(x).reshape(len(IDS), -1)
        inside = mask & torch.from_numpy(ids >= 0)
        return (torch.tanh(out) * target[: out.size(1)]).sum(1)[inside].sum()

    expected, gradients = by_autograd(module, run, ids, trainable)
    table, ours = by_rule(rule, module, run, trainable, **options)
    torch.testing.assert_close(table.sum(0), expected, rtol=1e-12, atol=0)
    assert {kind for kind, row in zip(KINDS, table) if row.any()} == set(kinds)
    assert ours.keys() == gradients.keys()
    for name in gradients:
        torch.testing.assert_close(ours[name], gradients[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_fused_norm_and_linear(normalization, zero_centered):
    module = LayerNormLinear(6, 5, normalization, zero_centered)
    check(te_layer_norm_linear, module, lambda x: module(x)[0], 6, {"linear", "norm", "bias"})


@pytest.mark.parametrize(
    ("name", "kind"),
    [("weight", "linear"), ("bias", "bias"), ("layer_norm_weight", "norm"), ("layer_norm_bias", "norm")],
)
def test_fused_norm_and_linear_of_which_one_parameter_is_trained(name, kind):
    module = LayerNormLinear(6, 5, "LayerNorm", False)
    check(te_layer_norm_linear, module, lambda x: module(x)[0], 6, {kind}, trainable=[name])


@pytest.mark.parametrize("mode", ["column", "row", None])
def test_linear(mode):
    module = Linear(6, 5, mode)
    check(te_linear, module, lambda x: module(x)[0], 6, {"linear", "bias"})


def test_norm():
    module = RMSNorm(6)
    check(norm, module, module, 6, {"norm"})


def test_grouped_linear():
    module, splits = GroupedLinear(6, 5, 3), [4, 0, 8]
    ids = np.array([2, 0, 1, 0, 0, 1, 2, 2, 1, 1, 0, -1])
    experts = [rows_of(part) for part in np.split(ids, [4, 4])]
    check(te_grouped_linear, module, lambda x: module(x[:, 0], splits)[0], 6, {"expert"}, ids=ids, experts=experts)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["dense", "grouped-experts", "latent-attention"])
def test_a_model_of_real_layers_equals_one_backward_per_trajectory(variant):
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed: it needs a GPU")
    if not torch.cuda.is_available():
        pytest.skip("Transformer Engine's layers run on a GPU only, and there is none")
    from megatron_vcpo.mcore.energies.exact import ExactEnergies
    from megatron_vcpo.mcore.packed_minibatch import PackingSettings
    from tests.oracle.energies import measure, per_trajectory_energies, worst_errors
    from tests.oracle.layouts import VOCAB, trajectories
    from tests.oracle.single_process import single_process_megatron

    with single_process_megatron() as groups:
        model = real_model(variant)
        expected = per_trajectory_energies(model, trajectories(), vocab_size=VOCAB)
        energies = ExactEnergies([model], groups, VCPOConfig(), torch.device("cuda"))
        measure(energies, trajectories(), packing=PackingSettings(budget=60), vocab_size=VOCAB)
        errors = worst_errors(energies.by_kind, expected)
        assert max(errors.values()) < 0.1, errors  # bf16, in which packed and single rows are rounded differently


def real_model(variant):
    """A GPTModel of Transformer Engine's layers in bf16."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    from tests.oracle.model_pairs import transformer_config

    experts = variant != "dense"
    config = transformer_config(
        {"dense": "qwen3", "grouped-experts": "qwen3_moe", "latent-attention": "deepseek_v3"}[variant],
        params_dtype=torch.bfloat16,
        bf16=True,
        transformer_impl="transformer_engine",
        use_cpu_initialization=False,
        moe_grouped_gemm=experts,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
    )
    if experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    return GPTModel(config, spec, vocab_size=128, max_sequence_length=64, position_embedding_type="rope").cuda()
