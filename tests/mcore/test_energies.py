"""Exact energies on one process, in fp64, against per-trajectory autograd; per kind of parameter and in total."""

import gc

import pytest
import torch

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.packed_minibatch import PackingSettings
from tests.oracle.energies import VARIANTS, measure, per_trajectory_energies, variant_model, worst_errors
from tests.oracle.layouts import VOCAB, trajectories
from tests.oracle.single_process import single_process_megatron


@pytest.fixture(scope="module")
def groups():
    with single_process_megatron() as collection:
        yield collection


def exact_energies(model, groups, **settings):
    from megatron_vcpo.mcore.energies.exact import ExactEnergies

    return ExactEnergies([model], groups, VCPOConfig(**settings), torch.device("cpu"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_energies_of_every_kind_of_parameter_equal_one_backward_per_trajectory(groups, variant):
    model, batch = variant_model(variant), trajectories()
    expected = per_trajectory_energies(model, batch, vocab_size=VOCAB)
    energies = exact_energies(model, groups)
    for budget, chunk in ((400, 0), (60, 0), (60, 7)):
        found = measure(energies, batch, packing=PackingSettings(budget=budget), vocab_size=VOCAB, chunk=chunk)
        errors = worst_errors(energies.by_kind, expected)
        assert max(errors.values()) < 1e-12, errors
        torch.testing.assert_close(found.energies, expected.sum(0), rtol=1e-12, atol=0)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("variant", ["tied", "gated-shared-expert", "layer-norm-and-biases"])
def test_a_pass_leaves_nothing_of_its_graph_to_the_garbage_collector(groups, variant):
    model = variant_model(variant)
    energies = exact_energies(model, groups)
    gc.collect()
    before = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]  # of other tests; held, so ids stay theirs
    known = {id(o) for o in before}
    gc.disable()
    try:
        measure(energies, trajectories(), packing=PackingSettings(budget=60), vocab_size=VOCAB)
        dispatchers = [vars(m.token_dispatcher) for m in model.modules() if hasattr(m, "token_dispatcher")]
        megatrons = {id(value) for attributes in dispatchers for value in attributes.values()}  # of its last call
        left = [
            o
            for o in gc.get_objects()
            if isinstance(o, torch.Tensor) and o.grad_fn is not None and id(o) not in megatrons | known
        ]
        assert not left, [tuple(tensor.shape) for tensor in left]
    finally:
        gc.enable()


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
    expected = per_trajectory_energies(variant_model(variant, scale=1.0), batch, vocab_size=VOCAB)
    energies = exact_energies(variant_model(variant, torch.float32, scale=1.0), groups)
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
