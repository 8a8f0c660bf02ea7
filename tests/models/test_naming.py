"""The tables: every parameter once, under whichever names Megatron's layer spec gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_vcpo.models.naming import (
    FAMILIES,
    Family,
    Kind,
    LatentSizes,
    ModelShape,
    NamingError,
    ParameterSpec,
    export_tensors,
    family_by_name,
    family_for_architecture,
    import_shard,
    shard_shape,
)
from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.gather import WeightGatherer
from tests.oracle.model_pairs import ALL_FAMILIES, VOCAB, gpt_models, transformer_config
from tests.oracle.te_names import transformer_engine_twin


def shape_of(**changes: Any) -> ModelShape:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 8,
        "num_query_groups": 2,
        "head_dim": 2,
        "ffn_hidden_size": 24,
        "vocab_size": 13,
        "padded_vocab_size": 24,
        "tied_embeddings": False,
        "num_experts": 4,
        "moe_ffn_hidden_size": 8,
        "moe_layers": (False, True),
    }
    return ModelShape(**(fields | changes))


LATENT = LatentSizes(q_lora_rank=16, kv_lora_rank=20, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=2)


def plain(family: Family, **changes: Any) -> ModelShape:
    """A shape the family can have."""
    fields: dict[str, Any] = {} if family.expert else {"num_experts": 0, "moe_layers": ()}
    if family.latent:
        fields |= {"latent": LATENT, "num_query_groups": 8, "shared_ffn_hidden_size": 16}
    return shape_of(**(fields | changes))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_no_name_appears_twice_in_a_table(family: Family) -> None:
    specs = family.parameters(plain(family))
    parts = [(name, spec.expert if spec.is_joined else None) for spec in specs for name, _ in spec.hf]
    for names in ([spec.name for spec in specs], parts):
        assert len(names) == len(set(names))
    assert family_for_architecture(family.architecture) is family_by_name(family.name) is family


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_shards_of_every_rank_together_are_the_original(family: Family, tp_size: int) -> None:
    """8 ranks are more than the 2 query groups: the split then cuts through a group."""
    shape = plain(family)
    generator = torch.Generator().manual_seed(0)
    for spec in family.parameters(shape):
        tensors = {name: torch.randn(size, generator=generator) for name, size in spec.hf}
        shards = [import_shard(spec, shape, tensors.__getitem__, rank, tp_size) for rank in range(tp_size)]
        assert {tuple(s.shape) for s in shards} == {shard_shape(spec, shape, tp_size)}
        back = dict(export_tensors(spec, shape, torch.stack(shards)))
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(back[name], tensor[spec.expert] if spec.is_joined else tensor)


def test_a_rank_with_padding_only_gets_zeros() -> None:
    shape = shape_of()
    spec = family_by_name("qwen3_moe").parameters(shape)[0]
    tensors = {name: torch.ones(size) for name, size in spec.hf}
    shards = [import_shard(spec, shape, tensors.__getitem__, rank, 4) for rank in range(4)]
    assert [int(s[:, 0].sum()) for s in shards] == [6, 6, 1, 0]
    assert not shards[3].any()


@pytest.mark.parametrize(("kind", "size"), [(Kind.COLUMN, (6, 4)), (Kind.ROW, (4, 6)), (Kind.GATE_UP, (6, 4))])
def test_sizes_that_do_not_divide_are_refused_by_name(kind: Kind, size: tuple[int, int]) -> None:
    hf = tuple((name, size) for name in ("a", "b"))[: 2 if kind is Kind.GATE_UP else 1]
    spec = ParameterSpec(kind, "layer.weight", hf, None, None)
    with pytest.raises(NamingError, match=r"layer\.weight: 6 does not divide over 4"):
        shard_shape(spec, shape_of(), 4)


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_transformer_engine_names_give_the_same_stream_as_local_ones(name: str, megatron_groups: Any) -> None:
    config = transformer_config(name)
    (model,) = gpt_models(config, tied=False)
    twin = transformer_engine_twin(model)
    names = [key for key, _ in twin.named_parameters()]
    fused = "linear_kv_up_proj" if name.startswith("deepseek") else "linear_qkv"
    assert f"decoder.layers.0.self_attention.{fused}.layer_norm_weight" in names
    if name == "qwen3_moe":
        assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in names
    shape = ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=128, tied_embeddings=False)
    local, engine = (
        list(WeightGatherer([m], family_by_name(name), shape, dtype=torch.float32).stream()) for m in (model, twin)
    )
    assert [key for key, _ in local] == [key for key, _ in engine]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(local, engine))


def test_missing_unknown_and_misshapen_parameters_are_all_listed_before_anything_is_sent(megatron_groups: Any) -> None:
    config = transformer_config("llama")
    (model,) = gpt_models(config, tied=False)
    model.decoder.layers[0].adapter = torch.nn.Linear(2, 2, bias=False)
    del model.decoder.layers[1].mlp.linear_fc2
    model.decoder.final_layernorm.weight = torch.nn.Parameter(torch.ones(7))
    shape = ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=128, tied_embeddings=False)
    with pytest.raises(SyncError) as caught:
        WeightGatherer([model], family_by_name("llama"), shape, megatron_groups, dtype=torch.float32)
    message = str(caught.value)
    assert "does not know: decoder.layers.0.adapter.weight" in message
    assert "decoder.final_layernorm.weight is (7,)" in message
    assert "no rank holds decoder.layers.1.mlp.linear_fc2.weight" in message


def test_a_model_that_is_no_gptmodel_is_refused() -> None:
    with pytest.raises(SyncError, match="Linear is not a Megatron-Core GPTModel"):
        WeightGatherer([torch.nn.Linear(2, 2)], family_by_name("llama"), plain(FAMILIES[0]), dtype=torch.float32)


def test_unknown_families_and_impossible_shapes_give_one_sentence() -> None:
    with pytest.raises(NamingError, match="known: llama"):
        family_by_name("gpt2")
    with pytest.raises(NamingError, match="LlamaForCausalLM"):
        family_for_architecture("GPT2LMHeadModel")
    with pytest.raises(NamingError, match="--num-query-groups"):
        shape_of(num_query_groups=3)
    with pytest.raises(NamingError, match="--vocab-size"):
        shape_of(vocab_size=25)
    with pytest.raises(NamingError, match="--num-experts"):
        family_by_name("llama").parameters(shape_of())


@pytest.mark.parametrize(
    ("frequency", "expected"), [(1, (True, True, True)), (2, (True, False, True)), ([0, 1, 1], (False, True, True))]
)
def test_moe_layer_freq_is_read_as_megatron_reads_it(frequency: Any, expected: tuple[bool, ...]) -> None:
    config = transformer_config("qwen3_moe", num_layers=3, moe_layer_freq=frequency)
    shape = ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=128, tied_embeddings=True)
    assert shape.moe_layers == expected


def test_settings_that_reorder_weights_are_refused() -> None:
    config = transformer_config("qwen3_moe")
    config.moe_mlp_glu_interleave_size = 32
    with pytest.raises(NamingError, match="--moe-mlp-glu-interleave-size"):
        ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=128, tied_embeddings=True)
