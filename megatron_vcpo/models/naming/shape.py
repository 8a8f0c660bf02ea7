"""ModelShape: the sizes that turn a family's table into concrete names and shapes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


class NamingError(ValueError):
    """A model that a family's table cannot describe; the message names the setting to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-latent attention (DeepSeek)."""

    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_head_dim: int  # dimensions without rotation
    qk_pos_emb_head_dim: int  # dimensions with rotation
    v_head_dim: int
    down_is_split: bool = dataclasses.field(default=True, compare=False)
    """Whether tensor-parallel ranks split the projections down to latents: True for the local layer spec, False for
    Transformer Engine's. It concerns only the layout, so two equal models may differ in it."""

    @property
    def query_head_dim(self) -> int:
        """Dimensions of a query head, rotated ones included."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of the whole model, independent of its layout over ranks."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int  # with multi-latent attention, of a query head
    ffn_hidden_size: int
    vocab_size: int  # rows of the Hugging Face embedding
    tied_embeddings: bool
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    moe_layers: tuple[bool, ...] = ()  # [num_layers] which layers hold experts; empty: none
    shared_ffn_hidden_size: int = 0  # of all shared experts of a layer together
    latent: LatentSizes | None = None  # None: multi-head attention


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(ModelSizes):
    """The sizes that a family's table needs: those of the model, and Megatron's padded vocabulary."""

    padded_vocab_size: int  # rows of Megatron's embedding, over all tensor-parallel ranks

    def __post_init__(self) -> None:
        if self.num_heads % self.num_query_groups:
            raise NamingError(
                f"{self.num_heads} attention heads do not divide into {self.num_query_groups} query groups; "
                "change --num-attention-heads or --num-query-groups."
            )
        if not 0 < self.vocab_size <= self.padded_vocab_size:
            raise NamingError(
                f"A vocabulary of {self.vocab_size} does not fit Megatron's padded one of {self.padded_vocab_size}; "
                "set --vocab-size to the checkpoint's vocab_size."
            )
        if self.moe_layers and len(self.moe_layers) != self.num_layers:
            raise NamingError(f"moe_layers names {len(self.moe_layers)} layers of {self.num_layers}.")

    @property
    def dims(self) -> dict[str, int]:
        """Name -> size of every dimension that a table's shapes use."""
        dims = {
            "hidden": self.hidden_size,
            "query": self.num_heads * self.head_dim,
            "kv": self.num_query_groups * self.head_dim,
            "head": self.head_dim,
            "ffn": self.ffn_hidden_size,
            "vocab": self.vocab_size,
            "experts": self.num_experts,
            "moe_ffn": self.moe_ffn_hidden_size,
            "moe_gate_up": 2 * self.moe_ffn_hidden_size,
            "heads": self.num_heads,
            "shared_ffn": self.shared_ffn_hidden_size,
        }
        if self.latent is not None:
            low, heads = self.latent, self.num_heads
            query = heads * low.query_head_dim
            dims |= {
                "q_lora": low.q_lora_rank or 0,
                "kv_lora": low.kv_lora_rank,
                "kv_lora_rope": low.kv_lora_rank + low.qk_pos_emb_head_dim,
                "latent_query": query,
                "direct_query": 0 if low.q_lora_rank else query,
                "latent_kv": heads * (low.qk_head_dim + low.v_head_dim),
                "latent_value": heads * low.v_head_dim,
            }
        return dims

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, holds experts."""
        return bool(self.moe_layers) and self.moe_layers[layer]

    @classmethod
    def from_megatron(
        cls, config: Any, *, vocab_size: int, padded_vocab_size: int, tied_embeddings: bool
    ) -> ModelShape:
        """Read the sizes from a TransformerConfig and the three facts that it does not hold.

        Raises NamingError for a setting that stores weights in an order that no table describes.
        """
        for field, flag in (
            ("moe_mlp_glu_interleave_size", "--moe-mlp-glu-interleave-size"),
            ("attention_output_gate", "--attention-output-gate"),
            ("mla_down_proj_fusion", "--mla-down-proj-fusion"),
            ("experimental_attention_variant", "--experimental-attention-variant"),
            ("moe_latent_size", "--moe-latent-size"),
            ("moe_shared_expert_gate", "--moe-shared-expert-gate"),
        ):
            if getattr(config, field, None):
                raise NamingError(f"{flag} changes how weights are stored and is not supported; leave it unset.")
        if config.mtp_num_layers:
            raise NamingError(
                "--mtp-num-layers adds multi-token-prediction layers, which neither the loss nor the engine uses here; "
                "leave it unset."
            )
        experts = config.num_moe_experts or 0
        latent = _latent_sizes(config) if config.multi_latent_attention else None
        return cls(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups or config.num_attention_heads,
            head_dim=latent.query_head_dim if latent else config.kv_channels,
            ffn_hidden_size=config.ffn_hidden_size,
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size,
            tied_embeddings=tied_embeddings,
            num_experts=experts,
            moe_ffn_hidden_size=(config.moe_ffn_hidden_size or config.ffn_hidden_size) if experts else 0,
            moe_layers=_moe_layers(config.moe_layer_freq, config.num_layers) if experts else (),
            shared_ffn_hidden_size=(config.moe_shared_expert_intermediate_size or 0) if experts else 0,
            latent=latent,
        )


def _moe_layers(frequency: int | list[int], num_layers: int) -> tuple[bool, ...]:
    """From Megatron's --moe-layer-freq: n for every n-th layer from the first, or a list with 0 or 1 for each layer."""
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(num_layers))
    if len(frequency) != num_layers:
        raise NamingError(f"--moe-layer-freq lists {len(frequency)} layers, --num-layers is {num_layers}.")
    return tuple(bool(flag) for flag in frequency)


def _latent_sizes(config: Any) -> LatentSizes:
    return LatentSizes(
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_head_dim,
        qk_pos_emb_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
        down_is_split=config.transformer_impl == "local",
    )
