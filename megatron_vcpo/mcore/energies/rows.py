"""Which trajectory owns each row of an activation matrix, and how ranks that share a trajectory gather its rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

Ids = npt.NDArray[np.int64]


@dataclass(eq=False, kw_only=True)
class Rows:
    """Owners of the rows of an activation matrix, kept on the host so that nothing waits for a GPU."""

    ids: Ids  # [t] trajectory of the minibatch, -1 for rows without an owner
    device: torch.device
    members: Ids = field(default_factory=lambda: np.zeros(0, np.int64))  # owners in the whole micro-batch, any rank
    _exchanges: dict[int, Exchange] = field(default_factory=dict)

    @cached_property
    def segments(self) -> list[tuple[int, slice | Tensor]]:
        """(trajectory, its rows): a slice where they are contiguous, else an index."""
        order = np.argsort(self.ids, kind="stable")
        owners, starts = np.unique(self.ids[order], return_index=True)
        found: list[tuple[int, slice | Tensor]] = []
        for owner, rows in zip(owners.tolist(), np.split(order, starts[1:])):
            if owner >= 0:
                contiguous = rows[-1] - rows[0] == len(rows) - 1
                index = slice(int(rows[0]), int(rows[-1]) + 1) if contiguous else self._on_device(rows)
                found.append((owner, index))
        return found

    @cached_property
    def counts(self) -> dict[int, int]:
        """Number of rows here for each trajectory."""
        owners, counts = np.unique(self.ids[self.ids >= 0], return_counts=True)
        return dict(zip(owners.tolist(), counts.tolist()))

    @cached_property
    def membership(self) -> tuple[Tensor, Tensor]:
        """The trajectories that own rows here, [n], and which rows each of them owns, [n, t] bool."""
        owners = np.unique(self.ids[self.ids >= 0])
        return self._on_device(owners), self._on_device(owners[:, None] == self.ids[None])

    def part(self, rank: int, size: int) -> Rows:
        """The contiguous slice that sequence-parallel rank `rank` of `size` holds."""
        return Rows(ids=np.split(self.ids, size)[rank], device=self.device, members=self.members)

    def chunk(self, start: int, stop: int, ranks: int) -> Rows:
        """Rows start : stop of each of `ranks` sequence-parallel ranks, rank by rank, in the order of a gather."""
        ids = self.ids.reshape(ranks, -1)[:, start:stop].reshape(-1)
        return Rows(ids=ids, device=self.device, members=self.members)

    def without(self, owners: list[int]) -> tuple[Rows, Tensor]:
        """The rows of all other trajectories, and their indices here; rows without an owner are left out too."""
        index = np.flatnonzero(~np.isin(self.ids, [-1, *owners]))
        return Rows(ids=self.ids[index], device=self.device, members=self.members), self._on_device(index)

    def coefficients(self, values: npt.NDArray[np.float64]) -> tuple[Tensor, Tensor | None]:
        """For each row its trajectory's value, and the rows to keep if some trajectory's value is 0 (else None).

        Args:
            values: [N] of the minibatch.

        Returns:
            [t'] fp64 for the rows kept (0 for rows without an owner), and [t'] indices.
        """
        of_rows = np.append(values, 0.0)[self.ids]
        keep = (of_rows != 0.0) | (self.ids < 0)
        if keep.all():
            return self._on_device(of_rows), None
        index = keep.nonzero()[0]
        return self._on_device(of_rows[index]), self._on_device(index)

    def exchange(self, group: Any) -> Exchange:
        """The plan by which the ranks of `group` send each trajectory's rows to one of them; made once per group."""
        if id(group) not in self._exchanges:
            self._exchanges[id(group)] = Exchange(self, group)
        return self._exchanges[id(group)]

    def _on_device(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


class Exchange:
    """Sends all rows of a trajectory that several ranks hold parts of to its owner: rank = index modulo ranks.

    A norm is that of the whole gradient only if one rank has all rows. Sending rows costs t * (d_in + d_out) numbers a
    layer, while summing the products would cost d_in * d_out for every trajectory; besides, the owners share the work
    of the products.
    """

    def __init__(self, rows: Rows, group: Any) -> None:
        self.group = group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        owners = np.where(rows.ids >= 0, rows.ids % size, size)
        order = np.argsort(owners, kind="stable")
        send = np.bincount(owners, minlength=size + 1)[:size]
        matrix = torch.empty(size * size, dtype=torch.int64, device=rows.device)
        dist.all_gather_into_tensor(matrix, torch.from_numpy(send).to(rows.device), group=group)
        self._send = [int(n) for n in send]
        self._receive = [int(n) for n in matrix.view(size, size)[:, rank].tolist()]
        self._order = torch.from_numpy(order[: sum(self._send)]).to(rows.device)
        ids = self(torch.from_numpy(rows.ids).to(rows.device))
        self.rows = Rows(ids=ids.cpu().numpy(), device=rows.device)

    def __call__(self, values: Tensor) -> Tensor:
        """Values [t, ...] of this rank's rows to values [t', ...] of the rows it owns; collective over the group."""
        out = values.new_empty(sum(self._receive), *values.shape[1:])
        dist.all_to_all_single(out, values[self._order].contiguous(), self._receive, self._send, group=self.group)
        return out
