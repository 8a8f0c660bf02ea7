"""Statistics of a minibatch from the micro-batches of its step, reduced once and equal on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.reductions import (
    from_first_rank,
    from_last_stage,
    gather_rows,
    group_size,
    is_last_stage,
    names_of_last_stage,
)
from megatron_vcpo.objective import combine_ess_statistics, ess_log_weights, ess_statistics

_LEADING = 4  # columns of a rank's row before its metrics: the statistics of the effective sample size


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """Statistics of the minibatch over all ranks."""

    rho: float
    usable: int  # number of trajectories that are finite in everything
    metrics: dict[str, float]  # means of what the loss returned


class StepStatistics:
    """Collects on the last pipeline stage; `reduce` gives every rank the result."""

    def __init__(self, config: VCPOConfig, groups: Any, device: torch.device) -> None:
        """Args: the objective; process groups tp, pp, cp and dp; device of the collectives' tensors."""
        self._config = config
        self._groups = groups
        self._device = device
        self._names: list[str] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the micro-batches so far."""
        self._log_weights: list[Tensor] = []  # [n] fp64 each
        self._metrics: dict[str, Tensor] = {}  # name -> [2] fp64 (sum, count)

    def add(self, metrics: dict[str, Tensor], log_weights: Tensor, usable: Tensor) -> None:
        """Add one micro-batch.

        Args:
            metrics: name -> [2] (sum, count), the same names in every micro-batch.
            log_weights: [n], of its trajectories.
            usable: [n] bool; trajectories that are not usable count nowhere.
        """
        for name, value in metrics.items():
            value = value.detach().double()
            self._metrics[name] = self._metrics[name] + value if name in self._metrics else value
        if log_weights.numel():
            self._log_weights.append(torch.where(usable, log_weights, torch.nan))

    def reduce(self) -> Reduced:
        """Collective over all ranks: one gather and a broadcast for each model-parallel dimension."""
        names, row = self._row()
        if is_last_stage(self._groups.pp):
            rows = gather_rows(row, self._groups.dp)
        else:
            rows = torch.empty(group_size(self._groups.dp), len(row), dtype=torch.float64, device=self._device)
        from_last_stage(rows, self._groups.pp)
        # The same computation may differ in the last bit between these ranks (atomic adds on a GPU).
        from_first_rank(rows, self._groups.tp)
        from_first_rank(rows, self._groups.cp)
        sums = rows[:, _LEADING:].sum(0).tolist()
        return Reduced(
            rho=float(combine_ess_statistics(rows[:, :4])),
            usable=int(rows[:, 3].sum().item()),
            metrics={name: sums[2 * i] / sums[2 * i + 1] for i, name in enumerate(names) if sums[2 * i + 1] > 0.0},
        )

    def _row(self) -> tuple[list[str], Tensor]:
        names = self._shared_names()
        row = torch.zeros(_LEADING + 2 * len(names), dtype=torch.float64, device=self._device)
        row[0] = -math.inf
        if self._log_weights:
            row[:4] = ess_statistics(ess_log_weights(torch.cat(self._log_weights), self._config))
        for i, name in enumerate(names):
            if name in self._metrics:
                row[_LEADING + 2 * i : _LEADING + 2 + 2 * i] = self._metrics[name]
        return names, row

    def _shared_names(self) -> list[str]:
        """Names of the loss's metrics; stages before the last receive them once, in the first step."""
        names = sorted(self._metrics)
        if self._names is None:
            self._names = names_of_last_stage(names, self._groups.pp)
        elif is_last_stage(self._groups.pp) and names != self._names:
            raise RuntimeError(
                f"The loss {self._config.loss} returned other metrics than in the first step "
                f"({sorted(set(names) ^ set(self._names))}); it must return the same keys in every micro-batch."
            )
        return self._names
