"""config.json from a Megatron model, Megatron's flags from a config.json, and the check that the two agree."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_vcpo.checkpoint.description import (
    LLAMA3_ROPE,
    ModelDescription,
    ModelFacts,
    describe_hf,
    describe_megatron,
)
from megatron_vcpo.checkpoint.errors import CheckpointError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

# Field of ModelDescription -> the Megatron flags that set it, given the value wanted.
_FLAGS: dict[str, Callable[[Any], list[str]]] = {
    "family": lambda v: {"qwen2": ["--add-qkv-bias"], "qwen3": ["--qk-layernorm"], "qwen3_moe": ["--qk-layernorm"]}.get(
        v.name, []
    ),
    "num_layers": lambda v: ["--num-layers", str(v)],
    "hidden_size": lambda v: ["--hidden-size", str(v)],
    "num_heads": lambda v: ["--num-attention-heads", str(v)],
    "num_query_groups": lambda v: ["--group-query-attention", "--num-query-groups", str(v)],
    "head_dim": lambda v: ["--kv-channels", str(v)],
    "ffn_hidden_size": lambda v: ["--ffn-hidden-size", str(v)],
    "vocab_size": lambda v: ["--vocab-size", str(v)],
    "tied_embeddings": lambda v: [] if v else ["--untie-embeddings-and-output-weights"],
    "norm_epsilon": lambda v: ["--norm-epsilon", str(v)],
    "rotary_base": lambda v: ["--rotary-base", f"{v:.0f}"],
    "rope_scaling_factor": lambda v: [] if v is None else ["--use-rope-scaling", "--rope-scaling-factor", str(v)],
    "max_position_embeddings": lambda v: ["--max-position-embeddings", str(v)],
    "num_experts": lambda v: ["--num-experts", str(v)] if v else [],
    "experts_per_token": lambda v: ["--moe-router-topk", str(v)] if v else [],
    "moe_ffn_hidden_size": lambda v: ["--moe-ffn-hidden-size", str(v)] if v else [],
    "moe_layers": lambda v: [] if all(v) else ["--moe-layer-freq", f"[{','.join(str(int(m)) for m in v)}]"],
    "renormalize_top_k": lambda v: [],  # by --moe-router-pre-softmax, for models with experts only
}
_ALWAYS = (
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--attention-dropout", "0.0", "--hidden-dropout", "0.0"),
)
# Longer or shorter contexts than the checkpoint's are the user's choice.
_NOT_COMPARED = ("max_position_embeddings",)


def hf_config_from_megatron(config: Any, facts: ModelFacts, *, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json (transformers 5) of a Megatron model; CheckpointError where no family fits."""
    model = describe_megatron(config, facts)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(model.rotary_base)}
    if model.rope_scaling_factor is not None:
        rope |= {"rope_type": "llama3", "factor": float(model.rope_scaling_factor)} | LLAMA3_ROPE
    fields: dict[str, Any] = {
        "architectures": [model.family.architecture],
        "model_type": model.family.name,
        "dtype": str(dtype).removeprefix("torch."),
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_hidden_size,
        "hidden_act": "silu",
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": rope,
        "max_position_embeddings": model.max_position_embeddings,
        # transformers' defaults name tokens that another tokenizer does not have
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model.num_experts:
        fields |= {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.moe_ffn_hidden_size,
            "norm_topk_prob": model.renormalize_top_k,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, sparse in enumerate(model.moe_layers) if not sparse],
        }
    return fields


def write_engine_model_dir(
    path: str | Path, config: Any, facts: ModelFacts, tokenizer_dir: str | Path, *, dtype: torch.dtype
) -> None:
    """Write config.json and the tokenizer's files, so that an engine can start with dummy weights.

    Call it on one rank. Raises CheckpointError where no family fits or `tokenizer_dir` holds no tokenizer.
    """
    fields = hf_config_from_megatron(config, facts, dtype=dtype)
    source = Path(tokenizer_dir)
    files = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not any(file.name in ("tokenizer.json", "tokenizer.model", "vocab.json") for file in files):
        raise CheckpointError(
            f"{source} holds no Hugging Face tokenizer; set --rollout-tokenizer to a folder that does."
        )
    target = Path(path)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    for file in files:
        shutil.copyfile(file, target / file.name)


def check_config_matches(hf_dir: str | Path, config: Any, facts: ModelFacts) -> ModelDescription:
    """Raise CheckpointError where config.json and Megatron disagree: every field, and the flag that mends it."""
    wanted, actual = describe_hf(hf_dir), describe_megatron(config, facts)
    problems = []
    for field in _FLAGS:
        want, have = getattr(wanted, field), getattr(actual, field)
        if field in _NOT_COMPARED or want == have:
            continue
        if isinstance(want, float) and isinstance(have, int | float) and math.isclose(want, have, rel_tol=1e-6):
            continue
        problems.append(f"{field} is {_show(have)}, the checkpoint's {_show(want)} ({_mend(field, want, have)})")
    if problems:
        raise CheckpointError(f"Megatron's model is not the one in {hf_dir}: {'; '.join(problems)}.")
    return wanted


def _show(value: Any) -> str:
    return str(getattr(value, "name", value))


def _mend(field: str, want: Any, have: Any) -> str:
    """The flags to give, or to take away."""
    if field == "renormalize_top_k":
        return "remove --moe-router-pre-softmax" if want else "--moe-router-pre-softmax"
    flags, present = _FLAGS[field](want), _FLAGS[field](have)
    return " ".join(flags) if flags else f"remove {' '.join(f for f in present if f.startswith('--'))}"


def megatron_flags_for(hf_dir: str | Path, *, tensor_model_parallel_size: int = 1) -> list[str]:
    """Megatron's flags for the model in config.json, ready for a command line.

    --padded-vocab-size is given too: Megatron would derive it from the tokenizer, which may know fewer tokens than
    the checkpoint's embedding has rows.
    """
    model = describe_hf(hf_dir)
    flags = list(_ALWAYS)
    for field, make in _FLAGS.items():
        if field == "num_query_groups" and model.num_query_groups == model.num_heads:
            continue
        flags += make(getattr(model, field))
    if model.num_experts and not model.renormalize_top_k:
        flags.append("--moe-router-pre-softmax")
    multiple = 128 * tensor_model_parallel_size
    return [*flags, "--padded-vocab-size", str(math.ceil(model.vocab_size / multiple) * multiple)]
