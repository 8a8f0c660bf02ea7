"""What the layers of a model on a CPU are made of."""

from __future__ import annotations

from typing import Any

from megatron_vcpo.patches import cpu_packed_attention, mla_local_key_gradient


def packed_local_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's default local layer spec with a core attention that takes packed sequences."""
    from megatron.training.models.gpt import default_layer_spec

    mla_local_key_gradient.apply()
    spec = default_layer_spec(config, vp_stage)
    for layer in getattr(spec, "layer_specs", [spec]):
        layer.submodules.self_attention.submodules.core_attention = cpu_packed_attention.PackedCoreAttention
    return spec
