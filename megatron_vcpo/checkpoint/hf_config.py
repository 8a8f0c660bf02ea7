"""config.json from a Megatron model, Megatron's flags from a config.json, and a check that the two agree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_vcpo.checkpoint.model_files import ModelFiles, write_folder
from megatron_vcpo.models.description import ModelDescription, ModelFacts, describe_hf, describe_megatron
from megatron_vcpo.models.description.flags import FLAGS, NOT_COMPARED, megatron_flags
from megatron_vcpo.models.description.records import LLAMA3_ROPE, QUICK_GELU_ALPHA, YARN_ROPE
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.models.naming import Family


def hf_config_from_megatron(config: Any, facts: ModelFacts, *, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json (transformers 5) of a Megatron model; CheckpointError if it belongs to no family."""
    model = describe_megatron(config, facts)
    fields: dict[str, Any] = {
        "architectures": [model.family.architecture],
        "model_type": model.family.name,
        "dtype": str(dtype).removeprefix("torch."),
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_query_groups,
        "intermediate_size": model.ffn_hidden_size,
        "hidden_act": "silu",
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": _rope(model),
        "max_position_embeddings": model.max_position_embeddings,
        # ModelFiles sets these; transformers' defaults name tokens that this tokenizer may not have
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model.latent is None:
        fields["head_dim"] = model.head_dim
    return fields | _OWN_FIELDS.get(model.family.name, lambda _: {})(model)


def _rope(model: ModelDescription) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(model.rotary_base)}
    if model.rope_scaling_factor is not None:
        rope |= {"rope_type": "llama3", "factor": float(model.rope_scaling_factor)} | LLAMA3_ROPE
    if model.yarn is not None:
        rope |= {"rope_type": "yarn", "factor": model.yarn.factor} | YARN_ROPE
        if not model.yarn.truncate:
            rope["truncate"] = False
        if model.yarn.mscale_all_dim:
            rope |= {"mscale": model.yarn.mscale, "mscale_all_dim": model.yarn.mscale_all_dim}
    return rope


def _qwen3_moe(model: ModelDescription) -> dict[str, Any]:
    return {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "norm_topk_prob": model.renormalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, sparse in enumerate(model.moe_layers) if not sparse],
    }


def _mixtral(model: ModelDescription) -> dict[str, Any]:
    return {
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "sliding_window": None,
    }


def _gpt_oss(model: ModelDescription) -> dict[str, Any]:
    return {
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "sliding_window": model.sliding_window,
        "layer_types": [("full_attention" if n % 2 else "sliding_attention") for n in range(model.num_layers)],
        "swiglu_limit": model.swiglu_limit,
        "swiglu_alpha": QUICK_GELU_ALPHA,
        "attention_bias": True,
    }


def _deepseek(model: ModelDescription) -> dict[str, Any]:
    latent, groups = model.latent, model.expert_groups
    assert latent is not None
    v3 = model.family.name == "deepseek_v3"
    return {
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "n_shared_experts": model.shared_ffn_hidden_size // model.moe_ffn_hidden_size,
        "first_k_dense_replace": model.moe_layers.index(True),
        "moe_layer_freq": 1,
        "norm_topk_prob": model.renormalize_top_k,
        "scoring_func": "sigmoid" if v3 else "softmax",
        "topk_method": "noaux_tc" if v3 else "group_limited_greedy" if groups else "greedy",
        "n_group": groups.number if groups else 1,
        "topk_group": groups.chosen if groups else 1,
        "routed_scaling_factor": model.routed_scaling_factor,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_head_dim,
        "qk_rope_head_dim": latent.qk_pos_emb_head_dim,
        "v_head_dim": latent.v_head_dim,
    } | ({"rope_interleave": True, "num_nextn_predict_layers": 0} if v3 else {})


_OWN_FIELDS: dict[str, Callable[[ModelDescription], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}


def write_model_dir(path: str | Path, config: Any, facts: ModelFacts, files: ModelFiles, *, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder without weights: for an engine that starts with dummy weights, and as the record
    beside a checkpoint.

    Call it on one rank only. Raises CheckpointError if the model belongs to no family.
    """
    write_folder(path, files.laid_out(hf_config_from_megatron(config, facts, dtype=dtype)))


def check_config_matches(hf_dir: str | Path, config: Any, facts: ModelFacts) -> ModelDescription:
    """Check that config.json and Megatron agree, and return the model's description.

    Raises:
        CheckpointError: they disagree; every such field is listed with the flag that corrects it.
    """
    wanted, actual = describe_hf(hf_dir), describe_megatron(config, facts)
    problems = []
    for field in FLAGS:
        want, have = getattr(wanted, field), getattr(actual, field)
        if field in NOT_COMPARED or want == have:
            continue
        if isinstance(want, float) and isinstance(have, int | float) and math.isclose(want, have, rel_tol=1e-6):
            continue
        problems.append(f"{field} is {_show(have)}, the checkpoint's {_show(want)} ({_mend(field, want, have)})")
    if problems:
        raise CheckpointError(f"Megatron's model is not the one in {hf_dir}: {'; '.join(problems)}.")
    # only the built model knows how ranks split the latents
    return dataclasses.replace(wanted, latent=actual.latent)


def _show(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, Family):
        return f"({', '.join(f'{f.name} {getattr(value, f.name)}' for f in dataclasses.fields(value) if f.compare)})"
    return str(getattr(value, "name", value))


def _mend(field: str, want: Any, have: Any) -> str:
    """Which flags to add or remove to correct a field."""
    if field == "renormalize_top_k":
        return "remove --moe-router-pre-softmax" if want else "--moe-router-pre-softmax"
    flags, present = FLAGS[field](want), FLAGS[field](have)
    return " ".join(flags) if flags else f"remove {' '.join(f for f in present if f.startswith('--'))}"


def megatron_flags_for(hf_dir: str | Path, *, tensor_model_parallel_size: int = 1) -> list[str]:
    """Megatron's flags for the model in config.json, ready for a command line.

    They include --padded-vocab-size, because Megatron would derive it from the tokenizer, which may have fewer tokens
    than the checkpoint's embedding has rows.
    """
    model = describe_hf(hf_dir)
    multiple = 128 * tensor_model_parallel_size
    return [*megatron_flags(model), "--padded-vocab-size", str(math.ceil(model.vocab_size / multiple) * multiple)]
