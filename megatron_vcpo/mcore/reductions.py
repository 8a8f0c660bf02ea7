"""The few numbers that ranks exchange: all in fp64, each sum in one collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RankDisagreement(RuntimeError):
    """Ranks hold different values of something that must be identical; training on would diverge silently."""


def collective_device() -> torch.device:
    """The device on which collectives over the default group need their tensors."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def group_size(group: Any) -> int:
    """Number of ranks of a process group; 1 for None."""
    return dist.get_world_size(group) if group is not None else 1


def is_last_stage(pp_group: Any) -> bool:
    """Whether this rank is on the last pipeline stage."""
    return group_size(pp_group) == 1 or dist.get_rank(pp_group) == group_size(pp_group) - 1


def gather_rows(row: Tensor, group: Any) -> Tensor:
    """Gather [K] of every rank into [ranks, K]; K must be the same on all ranks."""
    size = group_size(group)
    if size == 1:
        return row[None]
    rows = [torch.empty_like(row) for _ in range(size)]
    dist.all_gather(rows, row.contiguous(), group=group)
    return torch.stack(rows)


def from_last_stage(values: Tensor, pp_group: Any) -> Tensor:
    """Broadcast the last pipeline stage's values to every stage, in place."""
    if group_size(pp_group) > 1:
        dist.broadcast(values, dist.get_process_group_ranks(pp_group)[-1], group=pp_group)
    return values


def from_first_rank(values: Tensor, group: Any) -> Tensor:
    """Broadcast the values of a group's first rank to all its ranks, in place."""
    if group_size(group) > 1:
        dist.broadcast(values, dist.get_process_group_ranks(group)[0], group=group)
    return values


def names_of_last_stage(names: list[str], pp_group: Any) -> list[str]:
    """Broadcast the last pipeline stage's strings to every stage; pickled and slow, so for the first step only."""
    if group_size(pp_group) == 1:
        return names
    holder: list[Any] = [names]
    dist.broadcast_object_list(holder, dist.get_process_group_ranks(pp_group)[-1], group=pp_group)
    return list(holder[0])


def sum_over(values: Tensor, group: Any) -> Tensor:
    """Sum over the ranks of a group, in place."""
    if group_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def agree(value: float, flag: bool, *, what: str, device: torch.device) -> bool:
    """Assert that `value` is bit-identical on all ranks and return whether any rank raised `flag`.

    One collective of three numbers over all ranks.

    Raises:
        RankDisagreement: on every rank, when the value differs somewhere.
    """
    extremes = torch.tensor([value, -value, float(flag)], dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
    high, low, flagged = extremes[0].item(), -extremes[1].item(), extremes[2].item()
    if high != low:
        raise RankDisagreement(
            f"{what} differs between ranks (lowest {low!r}, highest {high!r}, rank {dist.get_rank()} has {value!r}); "
            "stop the run and report this: parameters would drift apart."
        )
    return bool(flagged)
