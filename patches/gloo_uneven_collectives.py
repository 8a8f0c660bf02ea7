"""gloo refuses all_gather and reduce_scatter of unequal shapes, which MoE with expert tensor parallelism needs.

Versions: torch 2.13 (gloo backend; NCCL accepts them). Only installed on the CPU.
No longer needed when `tests/distributed/` shows that gloo accepts unequal shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def apply() -> None:
    """Replace both collectives by versions that fall back to broadcasts and an all-reduce for unequal shapes."""
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or len({output.shape for output in tensor_list}) == 1:
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        group = group or dist.group.WORLD
        rank = dist.get_rank(group)
        for source, output in enumerate(tensor_list):
            if source == rank:
                output.copy_(tensor)
            dist.broadcast(output, dist.get_global_rank(group, source), group=group)
        return None

    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or len({chunk.shape for chunk in input_list}) == 1:
            return scatter(output, input_list, op=op, group=group, async_op=async_op)
        group = group or dist.group.WORLD
        total = torch.cat([chunk.contiguous() for chunk in input_list])
        dist.all_reduce(total, op=op, group=group)
        output.copy_(total.split([len(chunk) for chunk in input_list])[dist.get_rank(group)])
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter
