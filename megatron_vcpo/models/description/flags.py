"""The Megatron flags that build a described model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_vcpo.models.description.records import ExpertGroups, ModelDescription, Yarn
from megatron_vcpo.models.naming import LatentSizes

_FAMILY_FLAGS = {
    "qwen2": ["--add-qkv-bias"],
    "qwen3": ["--qk-layernorm"],
    "qwen3_moe": ["--qk-layernorm"],
    "gpt_oss": [
        *("--softmax-type", "learnable", "--quick-geglu", "--glu-linear-offset", "1.0"),
        # Transformer Engine's grouped experts support biases only without this fusion
        *("--position-embedding-type", "yarn", "--no-bias-dropout-fusion"),
    ],
    "deepseek_v2": ["--qk-layernorm", "--moe-router-dtype", "fp32"],
    "deepseek_v3": [
        *("--qk-layernorm", "--moe-router-dtype", "fp32"),
        *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    ],
}


def _latent(value: LatentSizes | None) -> list[str]:
    if value is None:
        return []
    low_rank_query = ["--q-lora-rank", str(value.q_lora_rank)] if value.q_lora_rank else []
    return [
        "--multi-latent-attention",
        *low_rank_query,
        *("--kv-lora-rank", str(value.kv_lora_rank), "--qk-head-dim", str(value.qk_head_dim)),
        *("--qk-pos-emb-head-dim", str(value.qk_pos_emb_head_dim), "--v-head-dim", str(value.v_head_dim)),
    ]


def _yarn(value: Yarn | None) -> list[str]:
    if value is None:
        return ["--rope-type", "rope"]
    scales = ["--mscale", str(value.mscale), "--mscale-all-dim", str(value.mscale_all_dim)]
    if not value.truncate:
        scales.append("--no-yarn-correction-range-round-to-int")
    return ["--rope-type", "yarn", "--rotary-scaling-factor", str(value.factor), *scales]


def _groups(value: ExpertGroups | None) -> list[str]:
    if value is None:
        return []
    return ["--moe-router-num-groups", str(value.number), "--moe-router-group-topk", str(value.chosen)]


# Field of ModelDescription -> function from the value wanted to the flags that set it.
FLAGS: dict[str, Callable[[Any], list[str]]] = {
    "family": lambda v: _FAMILY_FLAGS.get(v.name, []),
    "num_layers": lambda v: ["--num-layers", str(v)],
    "hidden_size": lambda v: ["--hidden-size", str(v)],
    "num_heads": lambda v: ["--num-attention-heads", str(v)],
    "num_query_groups": lambda v: ["--group-query-attention", "--num-query-groups", str(v)],
    "head_dim": lambda v: ["--kv-channels", str(v)],
    "latent": _latent,
    "ffn_hidden_size": lambda v: ["--ffn-hidden-size", str(v)],
    "vocab_size": lambda v: ["--vocab-size", str(v)],
    "tied_embeddings": lambda v: [] if v else ["--untie-embeddings-and-output-weights"],
    "norm_epsilon": lambda v: ["--norm-epsilon", str(v)],
    "rotary_base": lambda v: ["--rotary-base", f"{v:.0f}"],
    "rope_scaling_factor": lambda v: [] if v is None else ["--use-rope-scaling", "--rope-scaling-factor", str(v)],
    "yarn": _yarn,
    "max_position_embeddings": lambda v: ["--max-position-embeddings", str(v)],
    "num_experts": lambda v: ["--num-experts", str(v)] if v else [],
    "experts_per_token": lambda v: ["--moe-router-topk", str(v)] if v else [],
    "moe_ffn_hidden_size": lambda v: ["--moe-ffn-hidden-size", str(v)] if v else [],
    "moe_layers": lambda v: [] if all(v) else ["--moe-layer-freq", f"[{','.join(str(int(m)) for m in v)}]"],
    "renormalize_top_k": lambda v: [],  # set by --moe-router-pre-softmax, only for models with experts
    "shared_ffn_hidden_size": lambda v: ["--moe-shared-expert-intermediate-size", str(v)] if v else [],
    "expert_groups": _groups,
    "sliding_window": lambda v: ["--window-size", f"{v - 1},0", "--window-attn-skip-freq", "2"] if v else [],
    "swiglu_limit": lambda v: ["--activation-func-clamp-value", str(v)] if v else [],
    "routed_scaling_factor": lambda v: [] if v == 1.0 else ["--moe-router-topk-scaling-factor", str(v)],
}
_ALWAYS = ("--normalization", "RMSNorm", "--attention-dropout", "0.0", "--hidden-dropout", "0.0")
_NOT_GPT_OSS = ("--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope")
# Longer or shorter contexts than the checkpoint's are the user's choice.
NOT_COMPARED = ("max_position_embeddings",)


def megatron_flags(model: ModelDescription) -> list[str]:
    """Every flag of the model except the padded vocabulary."""
    # latent attention has neither query groups nor a single head size
    left_out = {"num_query_groups", "head_dim"} if model.latent else set()
    if model.latent is None and model.yarn is None:
        left_out.add("yarn")
    if model.num_query_groups == model.num_heads:
        left_out.add("num_query_groups")
    flags = list(_ALWAYS if model.family.name == "gpt_oss" else _ALWAYS + _NOT_GPT_OSS)
    for field, make in FLAGS.items():
        if field not in left_out:
            flags += make(getattr(model, field))
    if model.yarn and not model.latent:  # multi-head attention takes its rope from --position-embedding-type
        place = flags.index("--rope-type")
        del flags[place : place + 2]
    if model.num_experts and not model.renormalize_top_k:
        flags.append("--moe-router-pre-softmax")
    return flags
