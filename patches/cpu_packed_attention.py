"""Core attention for the local layer spec that takes packed (THD) sequences.

Why: Megatron-Core's own DotProductAttention asserts that there is no packed_seq_params; only Transformer Engine's
takes them, and that needs a GPU. Versions: megatron-core 0.19.2, --transformer-impl local.
No longer needed when `tests/patches/test_cpu_packed_attention.py::test_stock_attention_still_refuses_packing` fails.

Sequences of similar length are padded to one batch and attended with torch's fused causal kernel: padding stands behind
the real tokens, so no real query ever sees it. The cost is sum(L^2), not (sum L)^2.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

_MAX_PADDING = 1.5  # padded tokens over real tokens of one padded batch before a new one is begun


class PackedCoreAttention(torch.nn.Module):
    """Causal attention over [s, b, h, d] (plain) or [t, h, d] with cu_seqlens (packed); grouped queries included."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: Any = None,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError(
                "Context parallelism is not available with --transformer-impl local; use transformer_engine."
            )
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[b, h, s, d] each; keys and values may have fewer heads."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Return [s, b, h * d] or, packed, [t, h * d]."""
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)
        if query.dim() == 4:  # [t, 1, h, d]
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        out = torch.zeros(*query.shape[:2], value.size(2), dtype=query.dtype, device=query.device)
        for rows in padded_batches(packed_seq_params.cu_seqlens_q):  # [b, s], -1 on padding
            real = rows >= 0
            index = rows.clamp(min=0)
            attended = self._attend(*(x[index].transpose(1, 2) for x in (query, key, value))).transpose(1, 2)
            out = out.index_put((rows[real],), attended[real])
        return out.reshape(out.size(0), -1)


def padded_batches(cu_seqlens: torch.Tensor) -> list[torch.Tensor]:
    """Token rows of each sequence, padded with -1 into few batches of similar length.

    Args:
        cu_seqlens: [n + 1] int, ends of the packed sequences, starting with 0.

    Returns:
        int64 tensors [b, s]; every row index below cu_seqlens[-1] stands in exactly one of them, once.
    """
    ends = cu_seqlens.tolist()
    spans = sorted(((end - start, start) for start, end in itertools.pairwise(ends) if end > start), reverse=True)
    groups: list[list[tuple[int, int]]] = []
    real = 0
    for span in spans:
        if groups and (len(groups[-1]) + 1) * groups[-1][0][0] <= _MAX_PADDING * (real + span[0]):
            groups[-1].append(span)
            real += span[0]
        else:
            groups.append([span])
            real = span[0]
    batches = []
    for group in groups:
        offsets = torch.arange(group[0][0], device=cu_seqlens.device)
        lengths = torch.tensor([length for length, _ in group], device=cu_seqlens.device)
        starts = torch.tensor([start for _, start in group], device=cu_seqlens.device)
        rows = starts[:, None] + offsets[None]
        batches.append(torch.where(offsets[None] < lengths[:, None], rows, -1))
    return batches
