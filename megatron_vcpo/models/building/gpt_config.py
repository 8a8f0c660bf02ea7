"""Megatron's configuration from which the policy is built."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_vcpo.patches import cpu_packed_attention, mla_direct_query, mla_local_key_gradient


def gpt_config(args: argparse.Namespace) -> Any:
    """Megatron's GPTModelConfig for its validated arguments; on a CPU, too, its layers take packed sequences."""
    from megatron.training.argument_utils import gpt_config_from_args

    mla_direct_query.apply()
    config = gpt_config_from_args(args)
    # gpt_config_from_args() of 0.19.2 forgets it and leaves it at 8, an error that short sequences hardly show.
    config.rope_scaling_factor = args.rope_scaling_factor
    if args.transformer_impl == "local":
        config.transformer_layer_spec = packed_local_spec
    return config


def packed_local_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's default local layer spec with a core attention that takes packed sequences."""
    from megatron.training.models.gpt import default_layer_spec

    mla_local_key_gradient.apply()
    spec = default_layer_spec(config, vp_stage)
    for layer in getattr(spec, "layer_specs", [spec]):
        layer.submodules.self_attention.submodules.core_attention = cpu_packed_attention.PackedCoreAttention
    return spec
