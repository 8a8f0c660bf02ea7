"""transformers -> Megatron -> transformers: the same logits on the way, the same bits at the end."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_vcpo.checkpoint.hf_config import check_config_matches
from megatron_vcpo.checkpoint.load_hf import load_hf_checkpoint
from megatron_vcpo.models.building.rotary import check_rotary
from megatron_vcpo.models.description import ModelFacts
from megatron_vcpo.models.naming import ModelShape, family_by_name
from megatron_vcpo.sync.gather import WeightGatherer
from tests.oracle.model_pairs import ALL_FAMILIES, MOE_FFN, VOCAB, gpt_models, save_hf_model, transformer_config

pytestmark = pytest.mark.slow


def build(
    name: str, *, tied: bool, rope: dict[str, Any] | None = None, packed: bool = False, **changes: Any
) -> tuple[list[Any], ModelShape]:
    config = transformer_config(name, **changes)
    chunks = gpt_models(config, tied=tied, rope=rope, packed=packed)
    shape = ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=128, tied_embeddings=tied)
    return chunks, shape


def logits(chunk: Any, tokens: torch.Tensor) -> torch.Tensor:
    batch, length = tokens.shape
    causal = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    with torch.no_grad():
        return chunk(tokens, torch.arange(length).expand(batch, length), causal)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_a_checkpoint_computes_the_same_in_megatron_and_comes_back_bit_for_bit(
    name: str, tied: bool, tmp_path: Path, megatron_groups: Any
) -> None:
    hf = save_hf_model(tmp_path, name, tied=tied)
    chunks, shape = build(name, tied=tied)
    load_hf_checkpoint(chunks, family_by_name(name), shape, tmp_path, megatron_groups)

    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = hf(tokens).logits
    torch.testing.assert_close(logits(chunks[0], tokens)[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)

    gatherer = WeightGatherer(chunks, family_by_name(name), shape, megatron_groups, dtype=torch.float32)
    streamed = {key: tensor.clone() for key, tensor in gatherer.stream()}
    saved = load_file(tmp_path / "model.safetensors")
    assert streamed.keys() == saved.keys()
    assert list(streamed) == gatherer.names
    assert all(torch.equal(streamed[key], saved[key]) for key in saved)
    assert gatherer.nbytes == sum(tensor.nbytes for tensor in saved.values())


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_packed_sequences_compute_what_transformers_computes_for_each(
    name: str, tmp_path: Path, megatron_groups: Any
) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    hf = save_hf_model(tmp_path, name, tied=False)
    chunks, shape = build(name, tied=False, packed=True)
    load_hf_checkpoint(chunks, family_by_name(name), shape, tmp_path, megatron_groups)
    lengths = [30, 7, 19]
    tokens = torch.randint(0, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packing = PackedSeqParams("thd", ends, ends, max_seqlen_q=30, max_seqlen_kv=30)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    actual = chunks[0](tokens, positions, None, packed_seq_params=packing)[..., :VOCAB]
    with torch.no_grad():
        expected = torch.cat([hf(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    actual.square().mean().backward()
    gradients = {key: p.grad for key, p in chunks[0].named_parameters()}
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
YARN_ROPE = PLAIN_ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 4096, "factor": 8.0}
# name: (family, changes on the Hugging Face side, the same on Megatron's)
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "v2 with query latents and YaRN without scales": (
        "deepseek_v2",
        {"q_lora_rank": 16, "rope_parameters": YARN_ROPE, "max_position_embeddings": 32768},
        {"q_lora_rank": 16, "rope_type": "yarn", "rotary_scaling_factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.0},
    ),
    "v2 with groups of experts": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        },
        {"num_moe_experts": 8, "moe_router_topk": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ),
    "v3 with direct queries, no groups, no YaRN and experts in every layer": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_parameters": PLAIN_ROPE,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
        },
        {
            "q_lora_rank": None,
            "rope_type": "rope",
            "mscale_all_dim": 0.0,
            "moe_router_num_groups": None,
            "moe_router_group_topk": None,
            "moe_router_topk": 3,
            "moe_layer_freq": 1,
            "moe_shared_expert_intermediate_size": 2 * MOE_FFN,
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_kinds_of_one_family_compute_the_same_and_their_configs_agree(
    variant: str, tmp_path: Path, megatron_groups: Any
) -> None:
    name, theirs, ours = VARIANTS[variant]
    hf = save_hf_model(tmp_path, name, tied=False, **theirs)
    chunks, shape = build(name, tied=False, **ours)
    facts = ModelFacts(vocab_size=VOCAB, max_position_embeddings=128, rotary_base=5000, tied_embeddings=False)
    description = check_config_matches(tmp_path, chunks[0].config, facts)
    check_rotary(chunks, description)
    assert description.shape(128) == shape
    load_hf_checkpoint(chunks, description.family, shape, tmp_path, megatron_groups)
    tokens = torch.randint(0, VOCAB, (2, 100), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = hf(tokens).logits
    torch.testing.assert_close(logits(chunks[0], tokens)[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)


def test_the_routers_bias_travels_in_fp32_beside_half_precision(tmp_path: Path, megatron_groups: Any) -> None:
    from megatron.core.transformer.module import Float16Module

    save_hf_model(tmp_path, "deepseek_v3", tied=False)
    plain, shape = build("deepseek_v3", tied=False, params_dtype=torch.bfloat16, bf16=True)
    chunks = [Float16Module(plain[0].config, plain[0])]
    for module in chunks[0].modules():
        if hasattr(
            module, "_maintain_float32_expert_bias"
        ):  # as Megatron's builder does; its values are rounded by then
            module._maintain_float32_expert_bias()
    family = family_by_name("deepseek_v3")
    load_hf_checkpoint(chunks, family, shape, tmp_path, megatron_groups)
    gatherer = WeightGatherer(chunks, family, shape, megatron_groups, dtype=torch.bfloat16)
    streamed = {key: tensor.clone() for key, tensor in gatherer.stream()}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(streamed[bias], saved[bias])
    assert not torch.equal(saved[bias], saved[bias].bfloat16().float())
    assert {tensor.dtype for key, tensor in streamed.items() if key != bias} == {torch.bfloat16}
    assert gatherer.nbytes == sum(tensor.nbytes for tensor in streamed.values())


def test_llama_3_rope_scaling_computes_the_same(tmp_path: Path, megatron_groups: Any) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5000.0,
    }
    hf = save_hf_model(tmp_path, "llama", tied=False, max_position_embeddings=16384, rope_parameters=scaling)
    chunks, shape = build("llama", tied=False, rope={"rope_scaling": True, "rope_scaling_factor": 4.0})
    load_hf_checkpoint(chunks, family_by_name("llama"), shape, tmp_path, megatron_groups)
    tokens = torch.randint(0, VOCAB, (1, 120), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = hf(tokens).logits
    torch.testing.assert_close(logits(chunks[0], tokens)[..., :VOCAB], expected, rtol=1e-5, atol=1e-5)
    plain, _ = build("llama", tied=False)
    load_hf_checkpoint(plain, family_by_name("llama"), shape, tmp_path, megatron_groups)
    assert not torch.allclose(logits(plain[0], tokens)[..., :VOCAB], expected, atol=1e-3)


def test_padded_vocabulary_rows_are_zero_after_loading(tmp_path: Path, megatron_groups: Any) -> None:
    save_hf_model(tmp_path, "llama", tied=True)
    chunks, shape = build("llama", tied=True)
    load_hf_checkpoint(chunks, family_by_name("llama"), shape, tmp_path, megatron_groups)
    assert not chunks[0].embedding.word_embeddings.weight[VOCAB:].any()


def test_sharded_checkpoints_load_like_single_files(tmp_path: Path, megatron_groups: Any) -> None:
    hf = save_hf_model(tmp_path / "one", "llama", tied=False)
    hf.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    loaded = []
    for folder in ("one", "many"):
        chunks, shape = build("llama", tied=False)
        load_hf_checkpoint(chunks, family_by_name("llama"), shape, tmp_path / folder, megatron_groups)
        loaded.append(copy.deepcopy(chunks[0].state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(*(d.values() for d in loaded)) if torch.is_tensor(a))
