"""Token statistics of a whole micro-batch, gathered from the rows that each context-parallel rank computed.

Only a few numbers per token are exchanged. Every rank then computes the loss, the importance weights and the baselines
on whole sequences, with the same code as without context parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_vcpo.mcore.reductions import gather_rows


class _GatherContextRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Tensor, group: Any) -> Tensor:
        ctx.own_rows = rows[group.rank()]
        gathered = gather_rows(own, group)  # [cp, k, T / cp]
        whole = torch.empty(own.size(0), rows.numel(), dtype=own.dtype, device=own.device)
        whole[:, rows.flatten()] = gathered.transpose(0, 1).flatten(1)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Every rank computes the same loss, so its part of the gradient is already complete; summing would count it cp
        # times.
        return grad[:, ctx.own_rows], None, None


def gather_context_rows(own: Mapping[str, Tensor], rows: Tensor, group: Any) -> dict[str, Tensor]:
    """Statistics of all rows, in the micro-batch's order, on every context-parallel rank; one collective.

    Args:
        own: name -> [T / cp], this rank's rows, all of one dtype.
        rows: [cp, T / cp] int64, the rows that each rank holds.
        group: the context-parallel process group.

    Returns:
        name -> [T]. The gradient of a value flows to the rank that computed it and is not summed over ranks, because
        each of them is expected to compute the same loss.
    """
    whole = _GatherContextRows.apply(torch.stack(list(own.values())), rows, group)
    return dict(zip(own, whole))
