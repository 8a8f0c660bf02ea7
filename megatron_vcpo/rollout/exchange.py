"""All ranks end with all trajectories: flat columns through tensor all-gathers, nothing pickled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_vcpo.rollout.columns import Columns, pack_trajectories, unpack_trajectories
from megatron_vcpo.rollout.trajectory import Trajectory


def exchange_trajectories(local: Sequence[Trajectory], *, device: torch.device, group: Any = None) -> list[Trajectory]:
    """Trajectories of all ranks of a group, on every one of them, ordered by group and index.

    Args:
        local: this rank's; a trajectory is given by exactly one rank.
        device: where the backend wants its tensors.
        group: process group; None is the world.

    Raises:
        ValueError: a trajectory was given twice; it would weigh double in every mean.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        merged = list(local)
    else:
        merged = [
            t for columns in _gather(pack_trajectories(local), device, group) for t in unpack_trajectories(columns)
        ]
    merged.sort(key=lambda t: (t.group_id, t.index))
    for before, after in itertools.pairwise(merged):
        if (before.group_id, before.index) == (after.group_id, after.index):
            raise ValueError(f"{after.name} was handed in twice.")
    return merged


def _gather(columns: Columns, device: torch.device, group: Any) -> list[Columns]:
    names = sorted(columns)
    sizes = torch.tensor([len(columns[name]) for name in names], dtype=torch.int64, device=device)
    every_size = [torch.empty_like(sizes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every_size, sizes, group=group)
    counts = torch.stack(every_size).cpu()  # [ranks, columns]
    gathered: list[Columns] = [{} for _ in every_size]
    for place, name in enumerate(names):
        dtype = columns[name].dtype
        values = np.ascontiguousarray(columns[name]).view(np.uint8)
        width = int(counts[:, place].max()) * dtype.itemsize
        padded = torch.zeros(width, dtype=torch.uint8, device=device)
        padded[: len(values)] = torch.from_numpy(values.copy()).to(device)
        parts = [torch.empty_like(padded) for _ in every_size]
        if width:
            dist.all_gather(parts, padded, group=group)
        for rank, part in enumerate(parts):
            used = int(counts[rank, place]) * dtype.itemsize
            gathered[rank][name] = part[:used].cpu().numpy().view(dtype)
    return gathered
