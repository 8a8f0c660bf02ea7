"""Which trajectories of a minibatch take no part in its step; all ranks decide alike.

A trajectory that is itself not finite is left out before anything is packed. One for which a forward pass gives a
log-prob (of the policy or the reference) that is not finite is marked; the minibatch is then rebuilt without it, so
that every number of the step is as if the trajectory had never been there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.reductions import from_first_rank, from_last_stage, is_last_stage, sum_over

_MAX_ROUNDS = 3
"""With sound weights, every pass finds the same trajectories not finite. If each pass finds new ones, the weights or
the device of some rank are broken, and dropping ever more trajectories would leave an arbitrary minibatch."""


class Exclusions:
    """The trajectories of one minibatch that are left out. Only methods that say so are collective."""

    def __init__(self, groups: Any, device: torch.device) -> None:
        """Args: process groups tp, pp, cp and dp; device of the collectives' tensors."""
        self._groups = groups
        self._device = device
        self.given: tuple[Trajectory, ...] = ()
        self._kept: list[int] = []
        self._rounds = 0
        self._marks = torch.zeros(0)

    def begin(self, trajectories: Sequence[Trajectory]) -> None:
        """Start a minibatch, and leave out trajectories that are themselves not finite."""
        self.given = tuple(trajectories)
        self._kept = [i for i, trajectory in enumerate(self.given) if trajectory.finite]
        self._rounds = 0
        self._clear()

    def is_of(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether these are the same objects that `begin` was last given."""
        return len(trajectories) == len(self.given) and all(a is b for a, b in zip(trajectories, self.given))

    @property
    def kept(self) -> list[Trajectory]:
        """The trajectories that take part, in their order."""
        return [self.given[i] for i in self._kept]

    @property
    def excluded(self) -> frozenset[int]:
        """Places in the minibatch of the trajectories that take no part."""
        return frozenset(range(len(self.given))) - frozenset(self._kept)

    @property
    def exhausted(self) -> bool:
        """Whether so many passes found new ones that it is pointless to go on."""
        return self._rounds > _MAX_ROUNDS

    def mark(self, indices: Sequence[int], usable: Tensor) -> None:
        """Remember which trajectories of a micro-batch a pass found unusable.

        Args:
            indices: places of its trajectories among the kept ones.
            usable: [n] bool.
        """
        if len(indices):
            index = torch.tensor(indices, dtype=torch.int64, device=self._device)
            self._marks[index] += (~usable).double()

    def exclude_marked(self) -> bool:
        """Leave out what any rank marked; returns whether there was anything. Collective over all ranks."""
        marks = self._marks
        if is_last_stage(self._groups.pp):
            sum_over(marks, self._groups.dp)
        from_last_stage(marks, self._groups.pp)
        # The same computation may differ between these ranks where numbers overflow.
        from_first_rank(marks, self._groups.tp)
        from_first_rank(marks, self._groups.cp)
        found = bool((marks > 0.0).any())
        self._kept = [place for place, mark in zip(self._kept, marks.tolist()) if not mark > 0.0]
        self._rounds += found
        self._clear()
        return found

    def _clear(self) -> None:
        self._marks = torch.zeros(len(self._kept), dtype=torch.float64, device=self._device)
