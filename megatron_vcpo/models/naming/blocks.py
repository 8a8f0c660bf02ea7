"""The rules that families share, by the part of the model they describe."""

from __future__ import annotations

import torch

from megatron_vcpo.models.naming.rules import Kind, Rule

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


def layer_rule(
    kind: Kind, megatron: str, *hf: tuple[str, str], optional: bool = False, dtype: torch.dtype | None = None
) -> Rule:
    """A rule for every layer; names are relative to the layer."""
    places = tuple((_HF + name, sizes) for name, sizes in hf)
    return Rule(kind, _MEGATRON + megatron, places, optional=optional, dtype=dtype)


WORD_EMBEDDING = Rule(Kind.VOCAB, EMBEDDING, (("model.embed_tokens.weight", "vocab hidden"),))
FINAL_NORM = Rule(Kind.REPLICATED, "decoder.final_layernorm.weight", (("model.norm.weight", "hidden"),))
LM_HEAD = Rule(Kind.VOCAB, OUTPUT_LAYER, (("lm_head.weight", "vocab hidden"),))

_INPUT_NORM = layer_rule(Kind.REPLICATED, "input_layernorm.weight", ("input_layernorm.weight", "hidden"))
_MLP_NORM = layer_rule(Kind.REPLICATED, "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", "hidden"))

ATTENTION = (
    _INPUT_NORM,
    layer_rule(
        Kind.QKV,
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "query hidden"),
        ("self_attn.k_proj.weight", "kv hidden"),
        ("self_attn.v_proj.weight", "kv hidden"),
    ),
    layer_rule(Kind.ROW, "self_attention.linear_proj.weight", ("self_attn.o_proj.weight", "hidden query")),
    _MLP_NORM,
)
QKV_BIAS = (
    layer_rule(
        Kind.QKV,
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "query"),
        ("self_attn.k_proj.bias", "kv"),
        ("self_attn.v_proj.bias", "kv"),
    ),
)
QK_NORM = (
    layer_rule(Kind.REPLICATED, "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight", "head")),
    layer_rule(Kind.REPLICATED, "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight", "head")),
)
MLP = (
    layer_rule(
        Kind.GATE_UP,
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "ffn hidden"),
        ("mlp.up_proj.weight", "ffn hidden"),
    ),
    layer_rule(Kind.ROW, "mlp.linear_fc2.weight", ("mlp.down_proj.weight", "hidden ffn")),
)
ROUTER = (layer_rule(Kind.REPLICATED, "mlp.router.weight", ("mlp.gate.weight", "experts hidden")),)
EXPERT = (
    layer_rule(
        Kind.GATE_UP,
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", "moe_ffn hidden"),
        ("mlp.experts.{expert}.up_proj.weight", "moe_ffn hidden"),
    ),
    layer_rule(
        Kind.ROW,
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ("mlp.experts.{expert}.down_proj.weight", "hidden moe_ffn"),
    ),
)

MIXTRAL_ROUTER = (layer_rule(Kind.REPLICATED, "mlp.router.weight", ("block_sparse_moe.gate.weight", "experts hidden")),)
MIXTRAL_EXPERT = (
    layer_rule(
        Kind.GATE_UP,
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ("block_sparse_moe.experts.{expert}.w1.weight", "moe_ffn hidden"),
        ("block_sparse_moe.experts.{expert}.w3.weight", "moe_ffn hidden"),
    ),
    layer_rule(
        Kind.ROW,
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ("block_sparse_moe.experts.{expert}.w2.weight", "hidden moe_ffn"),
    ),
)

# Multi-latent attention. Both sides keep the rotary dimensions interleaved, so rows keep their order.
LATENT_ATTENTION = (
    _INPUT_NORM,
    layer_rule(
        Kind.COLUMN,
        "self_attention.linear_q_proj.weight",
        ("self_attn.q_proj.weight", "direct_query hidden"),
        optional=True,
    ),
    layer_rule(
        Kind.LATENT,
        "self_attention.linear_q_down_proj.weight",
        ("self_attn.q_a_proj.weight", "q_lora hidden"),
        optional=True,
    ),
    layer_rule(
        Kind.REPLICATED,
        "self_attention.q_layernorm.weight",
        ("self_attn.q_a_layernorm.weight", "q_lora"),
        optional=True,
    ),
    layer_rule(
        Kind.COLUMN,
        "self_attention.linear_q_up_proj.weight",
        ("self_attn.q_b_proj.weight", "latent_query q_lora"),
        optional=True,
    ),
    layer_rule(
        Kind.LATENT,
        "self_attention.linear_kv_down_proj.weight",
        ("self_attn.kv_a_proj_with_mqa.weight", "kv_lora_rope hidden"),
    ),
    layer_rule(Kind.REPLICATED, "self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight", "kv_lora")),
    layer_rule(
        Kind.COLUMN, "self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight", "latent_kv kv_lora")
    ),
    layer_rule(Kind.ROW, "self_attention.linear_proj.weight", ("self_attn.o_proj.weight", "hidden latent_value")),
    _MLP_NORM,
)
SHARED_EXPERT = (
    layer_rule(
        Kind.GATE_UP,
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "shared_ffn hidden"),
        ("mlp.shared_experts.up_proj.weight", "shared_ffn hidden"),
    ),
    layer_rule(
        Kind.ROW, "mlp.shared_experts.linear_fc2.weight", ("mlp.shared_experts.down_proj.weight", "hidden shared_ffn")
    ),
)
# A buffer that Megatron changes after each step (--moe-router-bias-update-rate). It affects which experts are chosen,
# so half precision would choose others.
ROUTER_BIAS = (
    layer_rule(
        Kind.REPLICATED,
        "mlp.router.expert_bias",
        ("mlp.gate.e_score_correction_bias", "experts"),
        dtype=torch.float32,
    ),
)

GPT_OSS_ATTENTION = (
    *ATTENTION,
    *QKV_BIAS,
    layer_rule(Kind.REPLICATED, "self_attention.linear_proj.bias", ("self_attn.o_proj.bias", "hidden")),
    layer_rule(Kind.COLUMN, "self_attention.core_attention.softmax_offset", ("self_attn.sinks", "heads")),
)
GPT_OSS_ROUTER = (
    layer_rule(Kind.REPLICATED, "mlp.router.weight", ("mlp.router.weight", "experts hidden")),
    layer_rule(Kind.REPLICATED, "mlp.router.bias", ("mlp.router.bias", "experts")),
)
GPT_OSS_EXPERT = (
    layer_rule(
        Kind.EXPERTS_GATE_UP,
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ("mlp.experts.gate_up_proj", "experts hidden moe_gate_up"),
    ),
    layer_rule(
        Kind.EXPERTS_GATE_UP,
        "mlp.experts.local_experts.{expert}.linear_fc1.bias",
        ("mlp.experts.gate_up_proj_bias", "experts moe_gate_up"),
    ),
    layer_rule(
        Kind.EXPERTS_ROW,
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ("mlp.experts.down_proj", "experts moe_ffn hidden"),
    ),
    layer_rule(
        Kind.EXPERTS_COPY,
        "mlp.experts.local_experts.{expert}.linear_fc2.bias",
        ("mlp.experts.down_proj_bias", "experts hidden"),
    ),
)
