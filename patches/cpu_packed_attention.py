"""Core attention for the local layer spec that takes packed (THD) sequences.

Why: Megatron-Core's own DotProductAttention asserts that packed_seq_params is None; only Transformer Engine's attention
takes them, and it needs a GPU. Versions: megatron-core 0.19.2, --transformer-impl local.
No longer needed when `tests/patches/test_cpu_packed_attention.py::test_stock_attention_still_refuses_packing` fails.

Sequences of similar length are padded into one batch for torch's fused causal kernel. Padding comes after the real
tokens, so no real query ever sees it. The cost is sum(L^2), not (sum L)^2. Under context parallelism, keys and values
are gathered from all ranks, and each rank computes its own queries, the rows of `RowAlignment.context_rows`. Sinks
(--softmax-type learnable) and windows (--window-size) are supported for GPT-OSS; they need an explicit mask.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

_MAX_PADDING = 1.5  # largest ratio of padded to real tokens in one batch


class PackedCoreAttention(torch.nn.Module):
    """Causal attention over [s, b, h, d] (plain) or [t, h, d] with cu_seqlens (packed); supports grouped queries."""

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
        self.window = _window(config, layer_number)
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            _split_over_ranks(self.softmax_offset)
        elif config.softmax_type != "vanilla":
            raise ValueError(
                f"--softmax-type {config.softmax_type} is not in this attention; use vanilla or learnable."
            )

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[b, h, s, d] each; keys and values may have fewer heads. Causal if there is no mask."""
        if self.window is not None or self.softmax_offset is not None:
            key, value, mask = self._with_window_and_sinks(query, key, value, mask)
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

    def _with_window_and_sinks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and an additive mask [h, s, k]; a sink is one more key, with its own score and a zero value."""
        if mask is None:
            mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
        if self.window is not None:
            positions = mask.sum(-1, keepdim=True) - 1  # the queries' positions, because the mask is causal
            mask = mask & (positions - torch.arange(key.size(2), device=query.device) <= self.window)
        scores = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -torch.inf)
        scores = scores.expand(query.size(1), -1, -1)
        if self.softmax_offset is not None:
            sinks = self.softmax_offset.to(query.dtype)[:, None, None].expand(-1, query.size(2), 1)
            key, value, scores = (
                F.pad(key, (0, 0, 0, 1)),
                F.pad(value, (0, 0, 0, 1)),
                torch.cat([scores, sinks], dim=-1),
            )
        return key, value, scores

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> Any:
        """The sinks, split over tensor-parallel ranks, as in Megatron-Core's own attention."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)

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
            # Padding repeats a row of the same sequence: from another sequence, a NaN would spread as 0 * NaN.
            index = torch.where(real, rows, rows[:, :1])
            attended = self._attend(*(x[index].transpose(1, 2) for x in (query, key, value))).transpose(1, 2)
            out = out.index_put((rows[real],), attended[real])
        return out.reshape(out.size(0), -1)

    def _context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        """[t / cp, h, d] each, the rows of this rank: every sequence's r-th chunk from the front and from the end."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        assert self.cp_group is not None
        rank, size = self.cp_group.rank(), self.cp_group.size()
        held: list[list[torch.Tensor]] = [[] for _ in range(size)]
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            chunks = torch.arange(start, end, device=query.device).view(2 * size, -1)
            for r in range(size):
                held[r] += [chunks[r], chunks[-1 - r]]
        own = torch.cat(held[rank])  # global row of each local row
        order = torch.cat([torch.cat(rows) for rows in held]).argsort()
        # Its backward is a reduce-scatter, which sums the gradients of all ranks' queries.
        key, value = (gather_from_sequence_parallel_region(x, group=self.cp_group)[order] for x in (key, value))
        out = []
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            local = slice(start // size, end // size)
            mask = own[local, None] >= torch.arange(start, end, device=query.device)
            q, k, v = (x.transpose(0, 1)[None] for x in (query[local], key[start:end], value[start:end]))
            out.append(self._attend(q, k, v, mask)[0].transpose(0, 1))
        return torch.cat(out).flatten(1)


def _window(config: Any, layer_number: int) -> int | None:
    """How many tokens before its own position a query of this layer attends to; None: all."""
    if config.window_size is None:
        return None
    from megatron.core.transformer.utils import is_layer_window_attention

    inside = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return int(config.window_size[0]) if inside else None


def _split_over_ranks(parameter: torch.nn.Parameter) -> None:
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)


def padded_batches(cu_seqlens: torch.Tensor) -> list[torch.Tensor]:
    """Token rows of each sequence, padded with -1 into few batches of similar length.

    Args:
        cu_seqlens: [n + 1] int, ends of the packed sequences, starting with 0.

    Returns:
        int64 tensors [b, s]; every row index below cu_seqlens[-1] occurs exactly once in all of them together.
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
