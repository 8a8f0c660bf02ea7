"""Latent attention of the local layer spec over tensor-parallel ranks: the gradient of the rotated part of the keys.

Why: every rank's heads use the one rotated key, which the local layer spec gathers from ranks that split the projection
down to latents. On the way back the stock gather hands each rank its slice of its own heads' gradient alone; the other
ranks' heads are lost (a gradient norm of 3.441 for 3.445 on a tiny DeepSeek-V3). Transformer Engine's layer spec does
not split that projection and is right.
Versions: megatron-core 0.19.2, --transformer-impl local with --sequence-parallel, which experts over tensor-parallel
ranks need. The rest of the layer then does what it does with Transformer Engine.
No longer needed when `tests/distributed/test_sync_layouts.py` passes without it (its gradients of kv_a_proj_with_mqa).
"""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Hand on the latents as rows of this rank, whose gather sums the gradients of all ranks. Idempotent."""
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
