"""Tiny random models for the tests of sync/ and checkpoint/: transformers' own, and Megatron's of the same size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from patches import megatron_cpu

HIDDEN, LAYERS, HEADS, GROUPS, HEAD_DIM, FFN, MOE_FFN, EXPERTS = 32, 2, 4, 2, 8, 48, 24, 4
VOCAB = 101  # odd: Megatron pads it
FAMILY_NAMES = ("llama", "qwen2", "qwen3", "qwen3_moe")


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
    prefix = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[name]
    if name != "qwen2":
        sizes["head_dim"] = HEAD_DIM
    if name == "qwen3_moe":
        sizes |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": MOE_FFN,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
        }
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**(sizes | changes))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start at one and biases at zero: a wrong one would not show
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def transformer_config(name: str, **changes: Any) -> Any:
    """Megatron's TransformerConfig of the same sizes, local layer spec, on the CPU."""
    megatron_cpu.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

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
        "qk_layernorm": name in ("qwen3", "qwen3_moe"),
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
    if name == "qwen3_moe":
        fields |= {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": MOE_FFN,
            "moe_layer_freq": [0, 1],
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }
    return TransformerConfig(**(fields | changes))


def gpt_models(config: Any, *, tied: bool, padded_vocab: int = 128, rope: dict[str, Any] | None = None) -> list[Any]:
    """This rank's GPTModels, one for each virtual pipeline stage. Needs initialised parallel state."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(stages) if stages else (None,):
        if config.num_moe_experts:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
        else:
            spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
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
                position_embedding_type="rope",
                rotary_base=5000,
                vp_stage=stage,
                **(rope or {}),
            ).eval()
        )
    return chunks
