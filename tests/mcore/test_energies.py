"""Exact energies on one process, in fp64, against per-trajectory autograd; per kind of parameter and in total."""

import pytest
import torch

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.minibatch import PackingSettings
from tests.oracle.energies import measure, per_trajectory_energies, worst_errors
from tests.oracle.layouts import VOCAB, trajectories
from tests.oracle.single_process import single_process_megatron


@pytest.fixture(scope="module")
def groups():
    with single_process_megatron() as collection:
        yield collection


# Fields of TransformerConfig, and what the model is built with.
VARIANTS = {
    "dense": {},
    "tied": {"tied": True},
    "layer-norm-and-biases": {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": torch.nn.functional.gelu,
        "tied": True,
    },
    "query-and-key-norms": {"qk_layernorm": True, "add_qkv_bias": True},
    "full-recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "tied": True,
    },
    "experts": {"experts": 4},
    "experts-tied": {"experts": 4, "tied": True, "qk_layernorm": True},
    "shared-expert": {"experts": 4, "moe_shared_expert_intermediate_size": 16},
    "gated-shared-expert": {"experts": 4, "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "experts-recomputed-with-auxiliary-losses": {
        "experts": 4,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.5,
        "moe_z_loss_coeff": 0.1,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def build(variant, dtype=torch.float64, scale=4.0):
    """A GPTModel of two layers with norms away from 1 and biases away from 0."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from patches.cpu_packed_attention import PackedCoreAttention
    from tests.oracle.tiny_gpt import Size, transformer_config

    options = dict(VARIANTS[variant])
    tied, experts = options.pop("tied", False), options.pop("experts", 0)
    config = transformer_config(Size(experts=experts), dtype, **options)
    spec = get_gpt_layer_local_spec(
        num_experts=experts or None,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
    )
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    torch.manual_seed(0)
    model = GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    ).to(dtype)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(dtype))
        else:
            parameter.data.mul_(scale)
    return model


def exact_energies(model, groups, **settings):
    from megatron_vcpo.mcore.energies.exact import ExactEnergies

    return ExactEnergies([model], groups, VCPOConfig(**settings), torch.device("cpu"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_energies_of_every_kind_of_parameter_equal_one_backward_per_trajectory(groups, variant):
    model, batch = build(variant), trajectories()
    expected = per_trajectory_energies(model, batch, vocab_size=VOCAB)
    energies = exact_energies(model, groups)
    for budget, chunk in ((400, 0), (60, 0), (60, 7)):
        found = measure(energies, batch, packing=PackingSettings(budget=budget), vocab_size=VOCAB, chunk=chunk)
        errors = worst_errors(energies.by_kind, expected)
        assert max(errors.values()) < 1e-12, errors
        torch.testing.assert_close(found.energies, expected.sum(0), rtol=1e-12, atol=0)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


# Megatron computes sigmoid scores in fp32, whose last bit depends on where in a vector register a number stands.
@pytest.mark.parametrize(("family", "tolerance"), [("deepseek_v2", 1e-12), ("deepseek_v3", 1e-6)])
def test_latent_attention_with_shared_and_routed_experts(groups, family, tolerance):
    from tests.oracle.model_pairs import gpt_models, transformer_config

    config = transformer_config(
        family,
        params_dtype=torch.float64,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
    )
    torch.manual_seed(0)
    model = gpt_models(config, tied=False)[0].double().train()
    batch = trajectories()
    expected = per_trajectory_energies(model, batch, vocab_size=VOCAB)
    energies = exact_energies(model, groups)
    measure(energies, batch, packing=PackingSettings(budget=60), vocab_size=VOCAB)
    errors = worst_errors(energies.by_kind, expected)
    assert errors.keys() >= {"linear", "expert", "router", "norm", "embedding", "output"}
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("variant", ["tied", "experts"])
def test_in_single_precision_every_kind_is_right_to_a_part_in_a_million(groups, variant):
    batch = trajectories()
    expected = per_trajectory_energies(build(variant, scale=1.0), batch, vocab_size=VOCAB)
    energies = exact_energies(build(variant, torch.float32, scale=1.0), groups)
    measure(energies, batch, packing=PackingSettings(budget=60), vocab_size=VOCAB)
    errors = worst_errors(energies.by_kind, expected)
    assert max(errors.values()) < 1e-6, errors


def test_short_and_long_trajectories_are_measured_alike_and_some_in_each_way(groups):
    """Ghost norms below 16 rows of a 32 x 32 weight, products from there on; both occur, in one packed batch."""
    lengths = [trajectory.num_tokens for trajectory in trajectories()]
    assert min(lengths) < 16 <= max(lengths)


def test_ranks_with_the_same_experts_share_trajectories_where_their_tokens_come_from_one_replica():
    from megatron_vcpo.mcore.energies.layout import share_classes

    assert sorted(share_classes([(0, {0}), (2, {0}), (4, {1}), (6, {1})])) == [[0, 2], [4, 6]]
    assert sorted(share_classes([(5, {0, 1}), (1, {2, 3}), (3, {1, 2}), (7, {4})])) == [[1, 3, 5], [7]]
