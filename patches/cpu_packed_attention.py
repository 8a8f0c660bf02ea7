"""Core attention for the local layer spec that takes packed (THD) sequences.

Why: Megatron-Core's own DotProductAttention asserts that there is no packed_seq_params; only Transformer Engine's
takes them, and that needs a GPU. Versions: megatron-core 0.19.2, --transformer-impl local.
No longer needed when `tests/patches/test_cpu_packed_attention.py::test_stock_attention_still_refuses_packing` fails.

Sequences of similar length are padded to one batch and attended with torch's fused causal kernel: padding stands behind
the real tokens, so no real query ever sees it. The cost is sum(L^2), not (sum L)^2. Under context parallelism keys and
values are gathered from all ranks, and each rank attends with the rows of `RowAlignment.context_rows` that it holds.
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
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[b, h, s, d] each; keys and values may have fewer heads. Causal without a mask."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
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
            if self.cp_group is not None:
                raise ValueError("This core attention takes packed sequences only under context parallelism.")
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)
        if query.dim() == 4:  # [t, 1, h, d]
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        if self.cp_group is not None:
            return self._context_parallel(query, key, value, packed_seq_params.cu_seqlens_q)
        out = torch.zeros(*query.shape[:2], value.size(2), dtype=query.dtype, device=query.device)
        for rows in padded_batches(packed_seq_params.cu_seqlens_q):  # [b, s], -1 on padding
            real = rows >= 0
            index = rows.clamp(min=0)
            attended = self._attend(*(x[index].transpose(1, 2) for x in (query, key, value))).transpose(1, 2)
            out = out.index_put((rows[real],), attended[real])
        return out.reshape(out.size(0), -1)

    def _context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        """[t / cp, h, d] each, rows of this rank: the r-th chunk of every sequence from the front and from the end."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        rank, size = self.cp_group.rank(), self.cp_group.size()
        held: list[list[torch.Tensor]] = [[] for _ in range(size)]
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            chunks = torch.arange(start, end, device=query.device).view(2 * size, -1)
            for r in range(size):
                held[r] += [chunks[r], chunks[-1 - r]]
        own = torch.cat(held[rank])  # global row of each local one
        order = torch.cat([torch.cat(rows) for rows in held]).argsort()
        # Backward sums the gradients of all ranks' queries: a reduce-scatter.
        key, value = (gather_from_sequence_parallel_region(x, group=self.cp_group)[order] for x in (key, value))
        out = []
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            local = slice(start // size, end // size)
            mask = own[local, None] >= torch.arange(start, end, device=query.device)
            q, k, v = query[local], key[start:end], value[start:end]
            out.append(self._attend(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask)[0].transpose(0, 1))
        return torch.cat(out).flatten(1)


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
