"""Which trajectories of a minibatch take no part in its step, decided alike on all ranks.

What the trajectory itself shows is known before anything is packed. What only a forward pass shows (a log-prob of the
policy or of the reference that is not finite) is marked where it is found; the minibatch is then made anew without it,
so that the step is in every number the step that never had it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.reductions import from_first_rank, from_last_stage, is_last_stage, sum_over

_MAX_ROUNDS = 3
"""A trajectory that is not finite under sound weights is so every time; where each pass finds new ones, the weights or
the device of one rank are broken, and dropping what they touch would leave a minibatch that nobody chose."""


class Exclusions:
    """The trajectories of one minibatch that are left out; collective where it says so."""

    def __init__(self, groups: Any, device: torch.device) -> None:
        """Args: process groups tp, pp, cp and dp; device of the collectives' tensors."""
        self._groups = groups
        self._device = device
        self.given: tuple[Trajectory, ...] = ()
        self._kept: list[int] = []
        self._rounds = 0
        self._marks = torch.zeros(0)

    def begin(self, trajectories: Sequence[Trajectory]) -> None:
        """Start with a minibatch, and leave out what shows by itself that it cannot be trained on."""
        self.given = tuple(trajectories)
        self._kept = [i for i, trajectory in enumerate(self.given) if trajectory.finite]
        self._rounds = 0
        self._clear()

    def is_of(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether these are the very trajectories that `begin` was given last."""
        return len(trajectories) == len(self.given) and all(a is b for a, b in zip(trajectories, self.given))

    @property
    def kept(self) -> list[Trajectory]:
        """The trajectories that take part, in their order."""
        return [self.given[i] for i in self._kept]

    @property
    def excluded(self) -> frozenset[int]:
        """Places in the minibatch of those that do not."""
        return frozenset(range(len(self.given))) - frozenset(self._kept)

    @property
    def exhausted(self) -> bool:
        """Whether every pass found more, so that there is no point in going on."""
        return self._rounds > _MAX_ROUNDS

    def mark(self, indices: Sequence[int], usable: Tensor) -> None:
        """Remember what a pass found of a micro-batch.

        Args:
            indices: places of its trajectories among the kept ones.
            usable: [n] bool.
        """
        if len(indices):
            index = torch.tensor(indices, dtype=torch.int64, device=self._device)
            self._marks[index] += (~usable).double()

    def exclude_marked(self) -> bool:
        """Leave out what was marked on any rank, and say whether there was any; collective over all ranks."""
        marks = self._marks
        if is_last_stage(self._groups.pp):
            sum_over(marks, self._groups.dp)
        from_last_stage(marks, self._groups.pp)
        # Replicated arithmetic may differ between these ranks where numbers overflow.
        from_first_rank(marks, self._groups.tp)
        from_first_rank(marks, self._groups.cp)
        found = bool((marks > 0.0).any())
        self._kept = [place for place, mark in zip(self._kept, marks.tolist()) if not mark > 0.0]
        self._rounds += found
        self._clear()
        return found

    def _clear(self) -> None:
        self._marks = torch.zeros(len(self._kept), dtype=torch.float64, device=self._device)
