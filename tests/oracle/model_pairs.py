"""Tiny random models for the tests of sync/ and checkpoint/: transformers' own, and Megatron's of the same size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from megatron_vcpo.patches import megatron_cpu, mla_direct_query, mla_local_key_gradient
from megatron_vcpo.patches.cpu_packed_attention import PackedCoreAttention

# As patches/torch_cuda_alias.py has it where torch's compiler is not imported before it.
torch._dynamo.config.disable = True

HIDDEN, LAYERS, HEADS, GROUPS, HEAD_DIM, FFN, MOE_FFN, EXPERTS = 32, 2, 4, 2, 8, 48, 24, 4
VOCAB = 101  # odd: Megatron pads it
ALL_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")
# Of each kind of DeepSeek: V2 projects queries directly and has no YaRN, as V2-Lite; V3 as published, but small.
LATENT = {"kv_lora_rank": 12, "v_head_dim": 6}  # both sides call these by one name
NOPE, ROPE, Q_LORA, V3_EXPERTS = 8, 4, 16, 8
WINDOW = 8
YARN = {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3}


_GPT_OSS_YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": False,
}
_CLASS_PREFIX = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
}


def _hf_expert_sizes(name: str) -> dict[str, Any]:
    if name == "qwen3_moe":
        return {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": MOE_FFN,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
        }
    if name == "mixtral":
        return {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": MOE_FFN}
    if name == "gpt_oss":
        return {
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "intermediate_size": MOE_FFN,
            "sliding_window": WINDOW,
            "attn_implementation": "eager",
            "max_position_embeddings": 16384,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        }
    if not name.startswith("deepseek"):
        return {}
    sizes = LATENT | {
        "num_key_value_heads": HEADS,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "rms_norm_eps": 1e-6,  # transformers fixes that of the latents' norms
        "moe_intermediate_size": MOE_FFN,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 2,
    }
    if name == "deepseek_v2":
        return sizes | {
            "q_lora_rank": None,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 2,
            "routed_scaling_factor": 3.0,
            "n_group": 1,
            "topk_group": 1,
        }
    return sizes | {
        "q_lora_rank": Q_LORA,
        "n_routed_experts": V3_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",  # this one and the next are for vLLM
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "original_max_position_embeddings": 4096} | YARN,
    }


def _megatron_expert_sizes(name: str) -> dict[str, Any]:
    if name in ("llama", "qwen2", "qwen3"):
        return {}
    sizes: dict[str, Any] = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": MOE_FFN,
        "moe_layer_freq": 1 if name in ("mixtral", "gpt_oss") else [0, 1],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }
    if name == "gpt_oss":
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        return sizes | {
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "window_size": (WINDOW - 1, 0),
            "window_attn_skip_freq": 2,
        }
    if not name.startswith("deepseek"):
        return sizes
    sizes |= LATENT | {
        "num_query_groups": None,
        "kv_channels": None,
        "layernorm_epsilon": 1e-6,
        "q_lora_rank": None,
        "qk_head_dim": NOPE,
        "qk_pos_emb_head_dim": ROPE,
        "rotary_base": 5000,
        "rope_type": "rope",
        "moe_shared_expert_intermediate_size": 2 * MOE_FFN,
        "moe_router_topk_scaling_factor": 3.0,
        "moe_router_pre_softmax": True,
    }
    if name == "deepseek_v2":
        return sizes
    return sizes | {
        "q_lora_rank": Q_LORA,
        "num_moe_experts": V3_EXPERTS,
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": MOE_FFN,
        "rope_type": "yarn",
        "rotary_scaling_factor": YARN["factor"],
        "mscale": YARN["mscale"],
        "mscale_all_dim": YARN["mscale_all_dim"],
    }


def save_hf_model(folder: Path, name: str, *, tied: bool, seed: int = 0, **changes: Any) -> Any:
    """Save a random transformers model of the family to `folder`; returns it."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "intermediate_size": FFN,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
    }
    prefix = _CLASS_PREFIX[name]
    if name != "qwen2" and not name.startswith("deepseek"):
        sizes["head_dim"] = HEAD_DIM
    sizes |= _hf_expert_sizes(name)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**(sizes | changes))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # norms start at one and biases at zero: a wrong one would not show
            if parameter.dim() == 1 or key.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    return model


def transformer_config(name: str, **changes: Any) -> Any:
    """Megatron's TransformerConfig of the same sizes, local layer spec, on the CPU."""
    megatron_cpu.install()
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    megatron_cpu.patch_megatron()
    fields: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": HEAD_DIM,
        "ffn_hidden_size": FFN,
        "layernorm_epsilon": 1e-5,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": name == "qwen2",
        "qk_layernorm": name not in ("llama", "qwen2", "mixtral", "gpt_oss"),
        "transformer_impl": "local",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
    }
    config_class = MLATransformerConfig if name.startswith("deepseek") else TransformerConfig
    config = config_class(**(fields | _megatron_expert_sizes(name) | changes))
    if name == "gpt_oss":  # no fields of the class: Megatron's argument_utils sets them the same way
        for field, value in _GPT_OSS_YARN.items():
            setattr(config, field, value)
    return config


def gpt_models(
    config: Any,
    *,
    tied: bool,
    padded_vocab: int = 128,
    rope: dict[str, Any] | None = None,
    packed: bool = False,
) -> list[Any]:
    """This rank's GPTModels, one for each virtual pipeline stage. Needs initialised parallel state.

    `packed`: with the attention that takes packed sequences. Latent attention has it always: Megatron-Core's own takes
    no values narrower than keys.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    mla_direct_query.apply()
    mla_local_key_gradient.apply()
    stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(stages) if stages else (None,):
        if config.num_moe_experts:
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
            )
        else:
            spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        if packed or config.multi_latent_attention:
            for layer in getattr(spec, "layer_specs", [spec]):
                layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
        ends = {"ignore_virtual": False, "vp_stage": stage}
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=padded_vocab,
                max_sequence_length=128,
                pre_process=parallel_state.is_pipeline_first_stage(**ends),
                post_process=parallel_state.is_pipeline_last_stage(**ends),
                share_embeddings_and_output_weights=tied,
                position_embedding_type="yarn" if config.softmax_type == "learnable" else "rope",
                vp_stage=stage,
                **({"rotary_base": 5000} | (rope or {})),
            ).eval()
        )
    return chunks
