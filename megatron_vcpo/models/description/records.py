"""What a Hugging Face config.json and Megatron's settings must agree on, as plain records."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.models.naming import Family, ModelShape, ModelSizes, NamingError

# Megatron fixes the other parameters of Llama 3's rope scaling (RotaryEmbedding._apply_scaling).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


# Megatron has no flags for these parameters of YaRN under multi-latent attention. All published models use these.
YARN_ROPE = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


QUICK_GELU_ALPHA = 1.702  # x * sigmoid(1.702 x) is what --quick-geglu computes


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN's rope scaling, as DeepSeek uses it: `mscale` and `mscale_all_dim` follow its paper's naming."""

    factor: float
    mscale: float  # cosine and sine are multiplied by m(mscale) / m(mscale_all_dim)
    mscale_all_dim: float  # with latents, the softmax scale is multiplied by m(mscale_all_dim)^2
    truncate: bool = True  # round both ends of the ramp outwards to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """Routing limited to the best groups of experts ("node-limited")."""

    number: int
    chosen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model that Megatron's TransformerConfig does not hold."""

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
class ModelDescription(ModelSizes):
    """A model of one of the families, whichever side it was read from."""

    family: Family
    norm_epsilon: float
    rotary_base: float
    rope_scaling_factor: float | None
    max_position_embeddings: int
    experts_per_token: int = 0
    renormalize_top_k: bool = False  # the chosen experts' weights sum to one
    expert_groups: ExpertGroups | None = None
    routed_scaling_factor: float = 1.0  # multiplies the chosen experts' weights
    yarn: Yarn | None = None
    sliding_window: int | None = None  # tokens, the current one included, that layers 0, 2, 4, ... attend to
    swiglu_limit: float | None = None  # GPT-OSS's clamped activation

    def shape(self, padded_vocab_size: int) -> ModelShape:
        """The sizes for the table of names; CheckpointError if they are inconsistent."""
        sizes = {entry.name: getattr(self, entry.name) for entry in fields(ModelSizes)}
        try:
            return ModelShape(**sizes, padded_vocab_size=padded_vocab_size)
        except NamingError as error:
            raise CheckpointError(f"This {self.family.name} model cannot be: {error}") from error


def refuse(start: str, found: dict[str, bool], reason: str) -> None:
    """Raise CheckpointError listing the names whose value is true, if there are any."""
    if names := [name for name, present in found.items() if present]:
        raise CheckpointError(f"{start} {', '.join(names)}; {reason}.")
