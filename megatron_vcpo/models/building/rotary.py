"""The rotary frequencies that a model should have, and a check that the built model has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_vcpo.models.description.records import LLAMA3_ROPE, YARN_ROPE, ModelDescription, Yarn
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.models.naming import unwrap


def rotary_frequencies(model: ModelDescription) -> torch.Tensor:
    """Angle per position of each pair of a head's rotated dimensions, `[dimensions / 2]`, fp64, in radians.

    Source of the scalings: "llama3" and "yarn" in transformers' modeling_rope_utils.
    """
    size = model.latent.qk_pos_emb_head_dim if model.latent else model.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    frequencies = model.rotary_base**-exponents
    if model.yarn is not None:
        keep = 1 - _yarn_ramp(model.rotary_base, size, model.yarn.truncate)
        return frequencies * (keep + (1 - keep) / model.yarn.factor)
    if model.rope_scaling_factor is None:
        return frequencies
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    turns = LLAMA3_ROPE["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: unchanged, 0: divided by the factor
    return frequencies * (keep + (1 - keep) / model.rope_scaling_factor)


def _yarn_ramp(base: float, size: int, truncate: bool) -> torch.Tensor:
    """For each pair of dimensions, 0 if it keeps its frequency, 1 if the frequency is divided by the factor."""

    def dimension(turns: float) -> float:
        length = YARN_ROPE["original_max_position_embeddings"]
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(YARN_ROPE["beta_fast"]), dimension(YARN_ROPE["beta_slow"])
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    return ((torch.arange(size // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)


def yarn_scales(yarn: Yarn | None) -> tuple[float, float]:
    """(factor of cosine and sine, factor of the softmax scale)."""
    if yarn is None or yarn.factor <= 1:
        return 1.0, 1.0
    scale, all_dim = (0.1 * m * math.log(yarn.factor) + 1.0 for m in (yarn.mscale, yarn.mscale_all_dim))
    return scale / all_dim, all_dim**2


def check_rotary(model_chunks: Sequence[torch.nn.Module], model: ModelDescription) -> None:
    """Raise CheckpointError if a built GPTModel rotates by other angles than `model` requires.

    Short sequences would hardly show the error. Megatron 0.19 parses --rope-scaling-factor but its own builder leaves
    the factor at 8: set `rope_scaling_factor` on the GPTModelConfig.
    """
    for chunk in map(unwrap, model_chunks):
        if model.latent is not None:
            for layer in chunk.decoder.layers:
                _check_yarn(layer.self_attention.rotary_pos_emb, layer.self_attention.softmax_scale, model)
            continue
        if model.yarn is not None:
            _check_yarn(chunk.rotary_pos_emb, None, model)
            continue
        if not _same(chunk.rotary_pos_emb.inv_freq, rotary_frequencies(model)):
            factor = "off" if model.rope_scaling_factor is None else model.rope_scaling_factor
            raise CheckpointError(
                f"Megatron's model does not rotate by base {model.rotary_base:g} with scaling factor {factor} on "
                f"{model.head_dim} dimensions; check --rotary-base, --use-rope-scaling, --rope-scaling-factor and "
                "--kv-channels, and that the factor reaches GPTModelConfig.rope_scaling_factor."
            )


def _check_yarn(rope: Any, softmax_scale: float | None, model: ModelDescription) -> None:
    frequencies, scale = rope.inv_freq, 1.0
    if model.yarn is not None:
        # the buffer inv_freq is unscaled in this class; the angles of the second position are the frequencies
        angles, scale = rope.get_emb(2)
        frequencies = angles[1, 0, 0, : angles.size(-1) // 2]
    expected, softmax = yarn_scales(model.yarn)
    softmax /= math.sqrt(model.head_dim)
    right = math.isclose(scale, expected, rel_tol=1e-6) and _same(frequencies, rotary_frequencies(model))
    if not right or (softmax_scale is not None and not math.isclose(softmax_scale, softmax, rel_tol=1e-6)):
        raise CheckpointError(
            f"Megatron's attention does not rotate by base {model.rotary_base:g} and {model.yarn or 'no YaRN'} "
            f"(cosine and sine times {scale:.6g}, not {expected:.6g}; softmax scale {softmax_scale}, not "
            f"{softmax:.6g}); check --rotary-base, --rope-type, --rotary-scaling-factor, --mscale, --mscale-all-dim "
            "and the size of a head."
        )


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and torch.allclose(actual.double().cpu(), expected, rtol=1e-4, atol=0.0)
