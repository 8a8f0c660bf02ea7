"""Latent attention of the local layer spec loses a part of the rotated key's gradient on several tensor-parallel ranks.

Why: all heads share one rotated key, which the local layer spec gathers from the ranks that split the projection down
to latents. In the backward, the stock gather gives each rank only its slice of its own heads' gradient; the gradients
from other ranks' heads are lost (a gradient norm of 3.441 instead of 3.445 on a tiny DeepSeek-V3). Transformer Engine's
layer spec does not split that projection and is correct.
Versions: megatron-core 0.19.2, --transformer-impl local with --sequence-parallel, which experts on several
tensor-parallel ranks need. With the patch, the rest of the layer does what it does with Transformer Engine.
No longer needed when `tests/distributed/test_sync_layouts.py` passes without it (its gradients of kv_a_proj_with_mqa).
"""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Pass the latents on as this rank's rows, whose gather sums the gradients of all ranks. Idempotent."""
    from megatron.core.tensor_parallel.mappings import (
        gather_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    stock = MLASelfAttention._qkv_down_projection
    if getattr(stock, "sums_gradients", False):
        return

    def down(self: Any, hidden_states: Any) -> Any:
        queries, keys = stock(self, hidden_states)
        config = self.config
        if config.sequence_parallel and keys.size(-1) != config.kv_lora_rank + config.qk_pos_emb_head_dim:
            keys = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(keys))
        return queries, keys

    down.sums_gradients = True  # type: ignore[attr-defined]
    MLASelfAttention._qkv_down_projection = down
