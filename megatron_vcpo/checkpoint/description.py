"""ModelDescription: what has to be the same in a Hugging Face config.json and in Megatron's settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_vcpo.checkpoint.errors import CheckpointError
from megatron_vcpo.sync.naming import FAMILIES, Family, ModelShape, NamingError, family_by_name

# Megatron fixes the other parameters of Llama 3's rope scaling (RotaryEmbedding._apply_scaling).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What Megatron's TransformerConfig does not hold."""

    vocab_size: int  # true vocabulary: rows of the Hugging Face embedding
    max_position_embeddings: int
    rotary_base: float
    tied_embeddings: bool
    rope_scaling_factor: float | None = None  # None: --use-rope-scaling is off
    position_embedding_type: str = "rope"
    rotary_percent: float = 1.0

    @classmethod
    def from_args(cls, args: Any, vocab_size: int) -> ModelFacts:
        """Read Megatron's parsed arguments."""
        return cls(
            vocab_size=vocab_size,
            max_position_embeddings=args.max_position_embeddings,
            rotary_base=args.rotary_base,
            tied_embeddings=not args.untie_embeddings_and_output_weights,
            rope_scaling_factor=args.rope_scaling_factor if args.use_rope_scaling else None,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model of one of the families, whichever side it was read from."""

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    norm_epsilon: float
    rotary_base: float
    rope_scaling_factor: float | None
    max_position_embeddings: int
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    moe_layers: tuple[bool, ...] = ()
    renormalize_top_k: bool = False  # the chosen experts' weights sum to one

    def shape(self, padded_vocab_size: int) -> ModelShape:
        """The sizes for the table of names."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_query_groups=self.num_query_groups,
            head_dim=self.head_dim,
            ffn_hidden_size=self.ffn_hidden_size,
            vocab_size=self.vocab_size,
            padded_vocab_size=padded_vocab_size,
            tied_embeddings=self.tied_embeddings,
            num_experts=self.num_experts,
            moe_ffn_hidden_size=self.moe_ffn_hidden_size,
            moe_layers=self.moe_layers,
        )


def describe_hf(folder: str | Path) -> ModelDescription:
    """Read a checkpoint's config.json.

    Raises:
        CheckpointError: no folder, no readable config.json, a family without a table, or a feature that Megatron
            would compute differently.
    """
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {path.parent}.")
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no config.json, so it is not a Hugging Face checkpoint.")
    try:
        model_type = json.loads(path.read_text())["model_type"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a model configuration: {error!r}.") from error
    known = [family.name for family in FAMILIES]
    if model_type not in known:
        raise CheckpointError(f"{path} is of model_type {model_type!r}; the known ones are {', '.join(known)}.")
    config = AutoConfig.from_pretrained(path.parent, local_files_only=True)
    _refuse(f"{path} asks for", _foreign_hf(config), "Megatron's GPT model does not compute that here")
    rope = config.rope_parameters
    return ModelDescription(
        family=family_by_name(model_type),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn_hidden_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        norm_epsilon=config.rms_norm_eps,
        rotary_base=rope["rope_theta"],
        rope_scaling_factor=rope["factor"] if rope["rope_type"] == "llama3" else None,
        max_position_embeddings=config.max_position_embeddings,
        **(_hf_experts(config) if model_type == "qwen3_moe" else {}),
    )


def _foreign_hf(config: Any) -> list[str]:
    """Features of a transformers configuration that Megatron's model would not reproduce."""
    rope = config.rope_parameters
    found = {
        f"hidden_act {config.hidden_act}": config.hidden_act != "silu",
        # qwen2 always has a bias on q, k and v and never says so
        "attention_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"rope_type {rope['rope_type']}": rope["rope_type"] not in ("default", "llama3"),
    }
    if rope["rope_type"] == "llama3":
        for key, value in LLAMA3_ROPE.items():
            found[f"rope {key} {rope[key]} (only {value})"] = rope[key] != value
    return [feature for feature, present in found.items() if present]


def _hf_experts(config: Any) -> dict[str, Any]:
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


def describe_megatron(config: Any, facts: ModelFacts) -> ModelDescription:
    """Read Megatron's TransformerConfig and the facts beside it.

    Raises:
        CheckpointError: the model is of none of the families; every flag to change is listed.
    """
    _refuse("A Hugging Face model of the known families needs", _foreign_megatron(config, facts), "change these flags")
    try:
        shape = ModelShape.from_megatron(
            config,
            vocab_size=facts.vocab_size,
            padded_vocab_size=facts.vocab_size,
            tied_embeddings=facts.tied_embeddings,
        )
    except NamingError as error:
        raise CheckpointError(str(error)) from error
    experts: dict[str, Any] = {}
    if shape.num_experts:
        experts = {
            "num_experts": shape.num_experts,
            "experts_per_token": config.moe_router_topk,
            "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
            "moe_layers": shape.moe_layers,
            "renormalize_top_k": not config.moe_router_pre_softmax,
        }
    return ModelDescription(
        family=family_by_name(_family_name(config)),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_query_groups=shape.num_query_groups,
        head_dim=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        vocab_size=facts.vocab_size,
        tied_embeddings=facts.tied_embeddings,
        norm_epsilon=config.layernorm_epsilon,
        rotary_base=facts.rotary_base,
        rope_scaling_factor=facts.rope_scaling_factor,
        max_position_embeddings=facts.max_position_embeddings,
        **experts,
    )


def _family_name(config: Any) -> str:
    if config.num_moe_experts:
        return "qwen3_moe"
    if config.qk_layernorm:
        return "qwen3"
    return "qwen2" if config.add_qkv_bias else "llama"


def _foreign_megatron(config: Any, facts: ModelFacts) -> list[str]:
    """Flags to change for the model to be of one of the families."""
    moe = bool(config.num_moe_experts)
    found = {
        "--normalization RMSNorm": config.normalization != "RMSNorm",
        "--swiglu": not (config.gated_linear_unit and config.activation_func is torch.nn.functional.silu),
        "--disable-bias-linear": config.add_bias_linear,
        "--position-embedding-type rope": facts.position_embedding_type != "rope",
        "--rotary-percent 1.0": facts.rotary_percent != 1.0,
        "no --rotary-interleaved": config.rotary_interleaved,
        "no --apply-layernorm-1p": config.layernorm_zero_centered_gamma,
        "no --window-size": config.window_size is not None,
        "--softmax-type vanilla": config.softmax_type != "vanilla",
        "--qk-layernorm": moe and not config.qk_layernorm,
        "no --add-qkv-bias": config.add_qkv_bias and (moe or config.qk_layernorm),
        "no --kv-channels": _family_name(config) == "qwen2"
        and config.kv_channels * config.num_attention_heads != config.hidden_size,
    }
    if moe:
        found |= {
            "--moe-router-score-function softmax": config.moe_router_score_function != "softmax",
            "no --moe-router-topk-scaling-factor": config.moe_router_topk_scaling_factor not in (None, 1.0),
            "no --moe-router-enable-expert-bias": config.moe_router_enable_expert_bias,
            "no --moe-router-num-groups": config.moe_router_num_groups is not None,
            "no --moe-shared-expert-intermediate-size": config.moe_shared_expert_intermediate_size is not None,
        }
    return [flag for flag, wanted in found.items() if wanted]


def _refuse(start: str, found: list[str], reason: str) -> None:
    if found:
        raise CheckpointError(f"{start} {', '.join(found)}; {reason}.")
