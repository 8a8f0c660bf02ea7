"""ModelDescription from Megatron's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch

from megatron_vcpo.models.description.records import YARN_ROPE, ExpertGroups, ModelDescription, ModelFacts, Yarn, refuse
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.models.naming import ModelShape, NamingError, family_by_name

_ONLY_EXPERTS = ("mixtral", "gpt_oss")  # families in which every layer has experts


def describe_megatron(config: Any, facts: ModelFacts) -> ModelDescription:
    """Read Megatron's TransformerConfig, and the facts that it does not hold.

    Raises:
        CheckpointError: the model belongs to no family; every flag to change is listed.
    """
    name = _family_name(config)
    foreign = _foreign_common(config, facts, name)
    foreign |= _foreign_gpt_oss(config, facts) if name == "gpt_oss" else _foreign_plain(config, facts)
    if config.num_moe_experts:
        foreign |= _foreign_experts(config, name)
    if config.multi_latent_attention:
        foreign |= _foreign_latent(config, facts)
    refuse(f"A Hugging Face model of the known families (here {name}) needs", foreign, "change these flags")
    try:
        shape = ModelShape.from_megatron(
            config,
            vocab_size=facts.vocab_size,
            padded_vocab_size=facts.vocab_size,
            tied_embeddings=facts.tied_embeddings,
        )
    except NamingError as error:
        raise CheckpointError(str(error)) from error
    return ModelDescription(
        family=family_by_name(name),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_query_groups=shape.num_query_groups,
        head_dim=shape.head_dim,
        # in these families the size of a layer without experts means nothing
        ffn_hidden_size=shape.moe_ffn_hidden_size if name in _ONLY_EXPERTS else shape.ffn_hidden_size,
        vocab_size=facts.vocab_size,
        tied_embeddings=facts.tied_embeddings,
        norm_epsilon=config.layernorm_epsilon,
        rotary_base=facts.rotary_base,
        rope_scaling_factor=facts.rope_scaling_factor,
        max_position_embeddings=facts.max_position_embeddings,
        latent=shape.latent,
        yarn=_plain_yarn(config) if name == "gpt_oss" else _yarn(config) if shape.latent else None,
        sliding_window=config.window_size[0] + 1 if name == "gpt_oss" else None,
        swiglu_limit=float(config.activation_func_clamp_value) if name == "gpt_oss" else None,
        **(_experts(config, shape) if shape.num_experts else {}),
    )


def _family_name(config: Any) -> str:
    if config.softmax_type == "learnable":
        return "gpt_oss"
    if config.multi_latent_attention:
        return "deepseek_v3" if config.moe_router_score_function == "sigmoid" else "deepseek_v2"
    if config.num_moe_experts:
        return "qwen3_moe" if config.qk_layernorm else "mixtral"
    if config.qk_layernorm:
        return "qwen3"
    return "qwen2" if config.add_qkv_bias else "llama"


def _experts(config: Any, shape: ModelShape) -> dict[str, Any]:
    groups = None
    if config.moe_router_group_topk:
        groups = ExpertGroups(number=config.moe_router_num_groups, chosen=config.moe_router_group_topk)
    return {
        "num_experts": shape.num_experts,
        "experts_per_token": config.moe_router_topk,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        "moe_layers": shape.moe_layers,
        # sigmoid scores are always divided by their sum
        "renormalize_top_k": config.moe_router_score_function == "sigmoid" or not config.moe_router_pre_softmax,
        "shared_ffn_hidden_size": shape.shared_ffn_hidden_size,
        "expert_groups": groups,
        "routed_scaling_factor": float(config.moe_router_topk_scaling_factor or 1.0),
    }


def _yarn(config: Any) -> Yarn | None:
    if config.rope_type != "yarn":
        return None
    return Yarn(
        factor=float(config.rotary_scaling_factor),
        mscale=float(config.mscale),
        mscale_all_dim=float(config.mscale_all_dim),
    )


def _plain_yarn(config: Any) -> Yarn:
    return Yarn(
        factor=float(config.yarn_rotary_scaling_factor),
        mscale=float(config.yarn_mscale),
        mscale_all_dim=float(config.yarn_mscale_all_dim),
        truncate=bool(config.yarn_correction_range_round_to_int),
    )


# ---------------------------------------------------------------------- flags to change


def _foreign_common(config: Any, facts: ModelFacts, name: str) -> dict[str, bool]:
    return {
        "--normalization RMSNorm": config.normalization != "RMSNorm",
        "--rotary-percent 1.0": facts.rotary_percent != 1.0,
        "no --rotary-interleaved": config.rotary_interleaved,
        "no --apply-layernorm-1p": config.layernorm_zero_centered_gamma,
        "no --add-qkv-bias": config.add_qkv_bias and name not in ("qwen2", "gpt_oss"),
        "no --kv-channels": name == "qwen2" and config.kv_channels * config.num_attention_heads != config.hidden_size,
    }


def _foreign_plain(config: Any, facts: ModelFacts) -> dict[str, bool]:
    """Flags to change in every family except GPT-OSS."""
    return {
        "--swiglu": not (config.gated_linear_unit and config.activation_func is torch.nn.functional.silu),
        "--disable-bias-linear": config.add_bias_linear,
        "--position-embedding-type rope": facts.position_embedding_type != "rope",
        "no --window-size": config.window_size is not None,
        "--softmax-type vanilla": config.softmax_type != "vanilla",
        "no --activation-func-clamp-value": config.activation_func_clamp_value is not None,
        "no --glu-linear-offset": config.glu_linear_offset != 0.0,
    }


def _foreign_gpt_oss(config: Any, facts: ModelFacts) -> dict[str, bool]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    window = config.window_size
    found = {
        "--quick-geglu": not (config.gated_linear_unit and config.activation_func is quick_gelu),
        "--glu-linear-offset 1.0": config.glu_linear_offset != 1.0,
        "--activation-func-clamp-value": config.activation_func_clamp_value is None,
        "no --disable-bias-linear": not config.add_bias_linear,
        "no --qk-layernorm": config.qk_layernorm,
        "no --multi-latent-attention": config.multi_latent_attention,
        "--num-experts": not config.num_moe_experts,
        "--window-size N,0": window is None or window[1] != 0,
        "--window-attn-skip-freq 2": config.window_attn_skip_freq != 2,
        "--position-embedding-type yarn": facts.position_embedding_type != "yarn",
    }
    for name, wanted in YARN_ROPE.items():
        # YarnRotaryEmbedding without latents: argument_utils sets its fields from the flags of the same names
        found[f"--yarn-{name.replace('_', '-')} {wanted}"] = getattr(config, f"yarn_{name}", wanted) != wanted
    return found


def _foreign_experts(config: Any, name: str) -> dict[str, bool]:
    deepseek, sigmoid = config.multi_latent_attention, name == "deepseek_v3"
    frequency = config.moe_layer_freq
    every = frequency == 1 or (isinstance(frequency, list) and all(frequency))
    found = {
        "--moe-router-score-function softmax": config.moe_router_score_function != "softmax" and not sigmoid,
        "--moe-router-enable-expert-bias": sigmoid and not config.moe_router_enable_expert_bias,
        "no --moe-router-enable-expert-bias": not sigmoid and config.moe_router_enable_expert_bias,
    }
    if not deepseek:
        scaled = config.moe_router_topk_scaling_factor not in (None, 1.0)
        return found | {
            "no --moe-router-topk-scaling-factor": scaled,
            "no --moe-router-num-groups": config.moe_router_num_groups is not None,
            "no --moe-shared-expert-intermediate-size": config.moe_shared_expert_intermediate_size is not None,
            "--qk-layernorm (qwen3_moe) or --moe-layer-freq 1": name in _ONLY_EXPERTS and not every,
            "--qk-layernorm (qwen3_moe) or no --moe-router-pre-softmax": name in _ONLY_EXPERTS
            and config.moe_router_pre_softmax,
        }
    best = 2 if sigmoid else 1  # how many of its experts the Hugging Face model ranks a group by
    groups = config.moe_router_group_topk
    shared, size = config.moe_shared_expert_intermediate_size, config.moe_ffn_hidden_size or config.ffn_hidden_size
    return found | {
        "--moe-router-topk above 1": sigmoid and config.moe_router_topk == 1,
        "--moe-router-pre-softmax": not sigmoid and not config.moe_router_pre_softmax,
        f"a --moe-router-group-topk of --moe-router-topk / {best}": bool(groups)
        and config.moe_router_topk // groups != best,
        "--moe-shared-expert-intermediate-size, a multiple of --moe-ffn-hidden-size": not shared or shared % size != 0,
        "--moe-layer-freq with the layers without experts first": (isinstance(frequency, int) and frequency != 1)
        or (isinstance(frequency, list) and sorted(frequency) != frequency),
    }


def _foreign_latent(config: Any, facts: ModelFacts) -> dict[str, bool]:
    found = {
        "--qk-layernorm": not config.qk_layernorm,
        "--num-experts": not config.num_moe_experts,
        "no --use-rope-scaling": facts.rope_scaling_factor is not None,
        # Megatron multiplies the softmax scale by it even with --rope-type rope
        "no --mscale-all-dim": config.rope_type == "rope"
        and config.rotary_scaling_factor > 1
        and config.mscale_all_dim != 0,
    }
    if config.rope_type == "yarn":
        # config.json has both scales or neither
        found["--mscale 1.0 (or a --mscale-all-dim)"] = not config.mscale_all_dim and config.mscale != 1.0
        found["--mscale above 0"] = bool(config.mscale_all_dim) and not config.mscale
        for name, value in YARN_ROPE.items():
            found[f"{name} {value}"] = getattr(config, name) != value
    return found
