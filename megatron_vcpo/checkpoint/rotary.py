"""The rotary frequencies a model should have, and the check that the built one has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_vcpo.checkpoint.description import LLAMA3_ROPE, ModelDescription
from megatron_vcpo.checkpoint.errors import CheckpointError
from megatron_vcpo.sync.naming import unwrap


def rotary_frequencies(model: ModelDescription) -> torch.Tensor:
    """Angle per position of each pair of a head's dimensions, `[head_dim / 2]`, fp64, in radians.

    Source of the scaling: transformers, modeling_rope_utils, "llama3".
    """
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
    frequencies = model.rotary_base**-exponents
    if model.rope_scaling_factor is None:
        return frequencies
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    turns = LLAMA3_ROPE["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: as it was, 0: slowed down by the factor
    return frequencies * (keep + (1 - keep) / model.rope_scaling_factor)


def check_rotary(model_chunks: Sequence[torch.nn.Module], model: ModelDescription) -> None:
    """Raise CheckpointError where a built GPTModel rotates by other angles than `model` asks for.

    Short sequences would hardly show it. Megatron 0.19 parses --rope-scaling-factor but its own builder leaves the
    factor at 8: set `rope_scaling_factor` on the GPTModelConfig.
    """
    expected = rotary_frequencies(model)
    for chunk in map(unwrap, model_chunks):
        actual = chunk.rotary_pos_emb.inv_freq.double().cpu()
        if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=1e-4):
            factor = "off" if model.rope_scaling_factor is None else model.rope_scaling_factor
            raise CheckpointError(
                f"Megatron's model does not rotate by base {model.rotary_base:g} with scaling factor {factor} on "
                f"{model.head_dim} dimensions; check --rotary-base, --use-rope-scaling, --rope-scaling-factor and "
                "--kv-channels, and that the factor reaches GPTModelConfig.rope_scaling_factor."
            )
