"""Give every rank all trajectories: the ranks that have some broadcast them as flat columns, without pickling."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_vcpo.data.columns import Columns, pack_trajectories, unpack_trajectories
from megatron_vcpo.data.trajectory import Trajectory

_PIECE_BYTES = 64 << 20


def exchange_trajectories(local: Sequence[Trajectory], *, device: torch.device, group: Any = None) -> list[Trajectory]:
    """Gather the trajectories of all ranks of a process group on each of them, ordered by prompt group and index.

    Args:
        local: this rank's trajectories; exactly one rank must pass each trajectory.
        device: where the group's backend needs its tensors.
        group: process group; None is the world.

    Raises:
        ValueError: a trajectory was passed twice, and would count double in every mean.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        merged = list(local)
    else:
        every = _gather(pack_trajectories(local), len(local), device, group)
        merged = [t for columns in every for t in unpack_trajectories(columns)]
    merged.sort(key=lambda t: (t.group_id, t.index))
    for before, after in itertools.pairwise(merged):
        if (before.group_id, before.index) == (after.group_id, after.index):
            raise ValueError(f"{after.name} was handed in twice.")
    return merged


def _gather(columns: Columns, count: int, device: torch.device, group: Any) -> list[Columns]:
    """The columns of every rank that has trajectories; each such rank broadcasts its own, piece by piece.

    Most ranks have none (only an engine's leader has its trajectories), and with every token's experts a phase has
    gigabytes. So nothing is padded to the fullest rank, and the device holds one piece at a time.
    """
    # Wider dtypes first, so that every column begins at a multiple of its item size.
    names = sorted(columns, key=lambda name: (-columns[name].itemsize, name))
    own = np.concatenate([np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8) for name in names])
    sizes = torch.tensor([columns[name].nbytes if count else 0 for name in names], dtype=torch.int64, device=device)
    every_size = [torch.empty_like(sizes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every_size, sizes, group=group)
    gathered: list[Columns] = []
    for rank, row in enumerate(torch.stack(every_size).tolist()):
        if not any(row):
            continue
        mine = rank == dist.get_rank(group)
        data = _from_rank(rank, own if mine else np.empty(sum(row), np.uint8), device, group, mine=mine)
        ends = np.cumsum(row).tolist()
        pieces = {name: data[end - size : end] for name, size, end in zip(names, row, ends)}
        gathered.append({name: piece.view(columns[name].dtype) for name, piece in pieces.items()})
    return gathered


def _from_rank(
    rank: int, data: npt.NDArray[np.uint8], device: torch.device, group: Any, *, mine: bool
) -> npt.NDArray[np.uint8]:
    source = rank if group is None else dist.get_global_rank(group, rank)
    for start in range(0, len(data), _PIECE_BYTES):
        here = torch.from_numpy(data[start : start + _PIECE_BYTES])
        piece = here.to(device)
        dist.broadcast(piece, source, group=group)
        if not mine and piece.data_ptr() != here.data_ptr():
            here.copy_(piece)
    return data
