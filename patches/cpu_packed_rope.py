"""Unfused rotary embedding loops over packed sequences in Python: half the time of a step if sequences are short.

Versions: megatron-core 0.19.2 without Transformer Engine's fused kernel. Bit-identical to the original; only installed
on the CPU. No longer needed when `tests/patches/test_cpu_packed_rope.py::test_stock_rope_still_loops` fails.
"""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    """Gather every token's own frequencies, then rotate all tokens at once."""
    from megatron.core.models.common.embeddings import rope_utils

    original = rope_utils._apply_rotary_pos_emb_thd

    def rotate_packed(
        t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args: Any, cp_group: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        if cp_group is None or cp_group.size() > 1 or freqs.size(0) == t.size(0):
            return original(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs)
        rows = torch.arange(t.size(0), device=t.device)
        sequence = torch.searchsorted(cu_seqlens[1:].long(), rows, right=True)
        positions = rows - cu_seqlens.long()[sequence]
        rotated = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], *args, **kwargs)
        return rotated.squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate_packed
