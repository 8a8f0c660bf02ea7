"""ModelDescription from a checkpoint's config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from megatron_vcpo.models.description.records import (
    LLAMA3_ROPE,
    QUICK_GELU_ALPHA,
    YARN_ROPE,
    ExpertGroups,
    ModelDescription,
    Yarn,
    refuse,
)
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.models.naming import FAMILIES, LatentSizes, family_by_name


def describe_hf(folder: str | Path) -> ModelDescription:
    """Read a checkpoint's config.json.

    Raises:
        CheckpointError: no folder, no readable config.json, a family without a table, or a feature that Megatron
            would compute differently.
    """
    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {path.parent}.")
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no config.json, so it is not a Hugging Face checkpoint.")
    try:
        model_type = json.loads(path.read_text())["model_type"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a model configuration: {error!r}.") from error
    known = [family.name for family in FAMILIES]
    if model_type not in known:
        raise CheckpointError(f"{path} is of model_type {model_type!r}; the known ones are {', '.join(known)}.")
    try:
        described = _described(path, model_type)
    except _ODD_VALUES as error:
        words = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} holds a value that no model can have: {type(error).__name__}: {words}."
        ) from error
    odd = {
        f"{name} {value}": not (isinstance(value, int | float) and 0 < value < math.inf)
        for name, value in _positive(described).items()
    }
    refuse(f"{path} asks for", odd, "no model has that")
    return described


# What transformers and arithmetic raise for values of the wrong type, zeros and infinities.
_ODD_VALUES = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, StrictDataclassError)


def _positive(described: ModelDescription) -> dict[str, Any]:
    sizes = ("num_layers", "hidden_size", "num_heads", "num_query_groups", "head_dim", "ffn_hidden_size", "vocab_size")
    others = ("norm_epsilon", "rotary_base", "max_position_embeddings")
    values = {name: getattr(described, name) for name in (*sizes, *others)}
    if described.num_experts:
        values |= {name: getattr(described, name) for name in ("experts_per_token", "moe_ffn_hidden_size")}
    return values


def _described(path: Path, model_type: str) -> ModelDescription:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path.parent, local_files_only=True)
    family = family_by_name(model_type)
    foreign = _foreign_rope(config) | _foreign_features(config)
    foreign |= _FOREIGN.get(model_type, lambda _: {})(config)
    refuse(f"{path} asks for", foreign, "Megatron's GPT model does not compute that here")
    rope = config.rope_parameters
    fields: dict[str, Any] = {
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope_scaling_factor": rope["factor"] if rope["rope_type"] == "llama3" else None,
    }
    return ModelDescription(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        ffn_hidden_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        norm_epsilon=config.rms_norm_eps,
        rotary_base=rope["rope_theta"],
        max_position_embeddings=config.max_position_embeddings,
        **(fields | _OWN_FIELDS.get(model_type, lambda _: {})(config)),
    )


def check_engine_reads(folder: str | Path) -> None:
    """Raise CheckpointError if vLLM would read a different model from a checkpoint's config.json than transformers
    does.

    transformers takes some settings from the model's class and does not write them; vLLM uses its own defaults.
    """
    path = Path(folder) / "config.json"
    fields = json.loads(path.read_text())
    every: dict[str, dict[str, str | None]] = {
        "deepseek_v2": {"n_group": None, "topk_group": None},
        "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    }
    needed = every.get(fields["model_type"], {})
    lacking = [f'"{key}": {json.dumps(value or 1)}' for key, value in needed.items() if fields.get(key) is None]
    if lacking:
        raise CheckpointError(f"{path} lacks {', '.join(lacking)}, which vLLM reads; add it to the file.")


# ---------------------------------------------------------------------- what Megatron would compute differently


def _foreign_features(config: Any) -> dict[str, bool]:
    return {
        f"hidden_act {config.hidden_act}": config.hidden_act != "silu",
        # qwen2 always has a bias on q, k and v, but config.json does not say so
        "attention_bias": getattr(config, "attention_bias", False) and config.model_type != "gpt_oss",
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
    }


def _foreign_rope(config: Any) -> dict[str, bool]:
    rope = config.rope_parameters
    kind = rope["rope_type"]
    known = {
        "deepseek_v2": ("default", "yarn"),
        "deepseek_v3": ("default", "yarn"),
        "gpt_oss": ("yarn",),
    }.get(config.model_type, ("default", "llama3"))
    found = {
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"rope_type {kind}": kind not in known,
    }
    scalings: dict[str, dict[str, Any]] = {"llama3": LLAMA3_ROPE, "yarn": YARN_ROPE}
    for key, value in scalings.get(kind, {}).items():
        given = rope.get(key, value)
        found[f"rope {key} {given} (only {value})"] = given != value
    if kind == "yarn":
        found |= {
            "rope truncate false": config.model_type != "gpt_oss" and not rope.get("truncate", True),
            "rope attention_factor": rope.get("attention_factor") is not None,
            "rope without a factor": rope.get("factor") is None,
            "rope mscale and mscale_all_dim of which one is zero": bool(rope.get("mscale"))
            != bool(rope.get("mscale_all_dim")),
        }
    return found


def _foreign_mixtral(config: Any) -> dict[str, bool]:
    return {"sliding_window": config.sliding_window is not None}


def _foreign_deepseek(config: Any) -> dict[str, bool]:
    return {
        f"moe_layer_freq {getattr(config, 'moe_layer_freq', 1)}": getattr(config, "moe_layer_freq", 1) != 1,
        "no layer with experts": config.first_k_dense_replace >= config.num_hidden_layers,
        "num_key_value_heads other than num_attention_heads": config.num_key_value_heads != config.num_attention_heads,
    }


def _foreign_v2(config: Any) -> dict[str, bool]:
    grouped = config.topk_method == "group_limited_greedy"
    return _foreign_deepseek(config) | {
        f"topk_method {config.topk_method}": config.topk_method not in ("greedy", "group_limited_greedy"),
        # Megatron ranks a group by the sum of its best experts, num_experts_per_tok // topk_group of them
        "topk_method group_limited_greedy, which ranks a group of experts by its best one": grouped
        and config.num_experts_per_tok // config.topk_group != 1,
        "norm_topk_prob": bool(config.norm_topk_prob),
        f"scoring_func {getattr(config, 'scoring_func', None)}": getattr(config, "scoring_func", "softmax")
        != "softmax",
    }


def _foreign_v3(config: Any) -> dict[str, bool]:
    grouped = config.n_group not in (None, 1)
    return _foreign_deepseek(config) | {
        "rope_interleave false": not config.rope_interleave,
        "norm_topk_prob false": not config.norm_topk_prob,
        "num_experts_per_tok 1": config.num_experts_per_tok == 1,
        "a topk_group that is not half of num_experts_per_tok": grouped
        and config.num_experts_per_tok // config.topk_group != 2,  # how many experts Megatron ranks a group by
        f"topk_method {getattr(config, 'topk_method', None)}": getattr(config, "topk_method", "noaux_tc") != "noaux_tc",
        f"scoring_func {getattr(config, 'scoring_func', None)}": getattr(config, "scoring_func", "sigmoid")
        != "sigmoid",
    }


def _foreign_gpt_oss(config: Any) -> dict[str, bool]:
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config.num_hidden_layers)]
    return {
        "layer_types other than sliding and full attention in turn": list(config.layer_types) != alternating,
        "no sliding_window": not config.sliding_window,
        "attention_bias false": not config.attention_bias,
        f"swiglu_alpha {config.swiglu_alpha}": config.swiglu_alpha != QUICK_GELU_ALPHA,
        "quantization_config (convert it to bfloat16 first)": getattr(config, "quantization_config", None) is not None,
    }


_FOREIGN: dict[str, Callable[[Any], dict[str, bool]]] = {
    "mixtral": _foreign_mixtral,
    "deepseek_v2": _foreign_v2,
    "deepseek_v3": _foreign_v3,
    "gpt_oss": _foreign_gpt_oss,
}


# ---------------------------------------------------------------------- the families' own fields


def _qwen3_experts(config: Any) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layers": tuple(
            layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
            for layer in range(config.num_hidden_layers)
        ),
        "renormalize_top_k": config.norm_topk_prob,
    }


def _mixtral_experts(config: Any) -> dict[str, Any]:
    return {
        "num_experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_layers": (True,) * config.num_hidden_layers,
        "renormalize_top_k": True,
    }


def _deepseek(config: Any) -> dict[str, Any]:
    grouped = config.n_group not in (None, 1) and getattr(config, "topk_method", None) != "greedy"
    latent = LatentSizes(
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_nope_head_dim,
        qk_pos_emb_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
    )
    return {
        "head_dim": latent.query_head_dim,
        "num_experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layers": tuple(layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers)),
        "renormalize_top_k": config.model_type == "deepseek_v3",
        "shared_ffn_hidden_size": config.moe_intermediate_size * config.n_shared_experts,
        "expert_groups": ExpertGroups(number=config.n_group, chosen=config.topk_group) if grouped else None,
        "routed_scaling_factor": float(config.routed_scaling_factor),
        "latent": latent,
        "yarn": _yarn(config.rope_parameters),
    }


def _gpt_oss(config: Any) -> dict[str, Any]:
    return _mixtral_experts(config) | {
        "yarn": _yarn(config.rope_parameters),
        "sliding_window": config.sliding_window,
        "swiglu_limit": float(config.swiglu_limit),
    }


_OWN_FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_experts,
    "mixtral": _mixtral_experts,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}


def _yarn(rope: dict[str, Any]) -> Yarn | None:
    if rope["rope_type"] != "yarn":
        return None
    # if neither is given, cosine and sine are multiplied by m(1) and the softmax scale is unchanged
    return Yarn(
        factor=float(rope["factor"]),
        mscale=float(rope.get("mscale") or 1.0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        truncate=rope.get("truncate", True),
    )
