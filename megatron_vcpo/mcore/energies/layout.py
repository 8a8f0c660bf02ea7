"""Which ranks hold parts of the same trajectory's gradient of the same parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_vcpo.config import ConfigError
from megatron_vcpo.mcore.energies.contributions import Share
from megatron_vcpo.mcore.reductions import collective_device, group_size


def _shared(group: Any) -> Any:
    return group if group_size(group) > 1 else None


@dataclass(frozen=True, kw_only=True)
class EnergyLayout:
    """The process groups that energies need."""

    tp: Any  # tensor parallel
    cp: Any  # context parallel
    tp_cp: Any
    pp: Any
    dp_cp: Any
    embd: Any  # first and last pipeline stage
    experts: Any  # ranks with the same experts that see rows of the same trajectories; None: only this rank

    @staticmethod
    def of(groups: Any, *, with_experts: bool) -> EnergyLayout:
        """From Megatron-Core's ProcessGroupCollection; collective over all ranks for a model with experts.

        Raises:
            ConfigError: a group that energies need is missing; without it they would be silently wrong.
        """
        names = ("tp", "cp", "tp_cp", "pp", "dp", "dp_cp", "embd", *(("tp_ep", "expt_dp") if with_experts else ()))
        if missing := [name for name in names if not hasattr(groups, name)]:
            raise ConfigError(
                f"--vcpo-energy exact needs the process groups {', '.join(missing)} in the ProcessGroupCollection; "
                "ProcessGroupCollection.use_mpu_process_groups() has them."
            )
        return EnergyLayout(
            **{name: getattr(groups, name) for name in ("tp", "cp", "tp_cp", "pp", "dp_cp", "embd")},
            experts=_expert_share(groups) if with_experts else None,
        )

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return group_size(self.tp)

    @property
    def tp_rank(self) -> int:
        """This rank's index among the tensor-parallel ranks."""
        return dist.get_rank(self.tp) if self.tp_size > 1 else 0

    @property
    def sharded(self) -> Share:
        """For a parameter of which each tensor-parallel rank holds its own shard and sees all rows (linear layers)."""
        return Share(group=_shared(self.cp))

    @property
    def replicated(self) -> Share:
        """For a parameter that every tensor-parallel rank holds whole, seeing all rows."""
        return Share(group=_shared(self.cp), counts=self.tp_rank == 0)

    @property
    def partial(self) -> Share:
        """For a parameter that every tensor-parallel rank holds whole, each seeing different rows or heads."""
        return Share(group=_shared(self.tp_cp) if self.tp_size > 1 else _shared(self.cp))

    @property
    def expert(self) -> Share:
        """For a parameter of an expert, whose shard the ranks of `experts` share."""
        return Share(group=self.experts)


def _expert_share(groups: Any) -> Any:
    """Group of ranks with this rank's experts and other rows of the same trajectories; None if there are none.

    Experts receive rows from the ranks of their tp_ep group; the data-parallel indices of those ranks say which
    trajectories. Ranks with the same experts (expt_dp) share trajectories if their tp_ep groups have an index in
    common. This happens when experts are split over fewer tensor-parallel ranks than the rest, or with context
    parallelism.
    """
    if group_size(groups.expt_dp) == 1:
        return None
    facts = torch.tensor(
        [dist.get_process_group_ranks(group)[0] for group in (groups.tp_ep, groups.expt_dp)] + [groups.dp.rank()],
        device=collective_device(),
    )
    table = torch.empty(dist.get_world_size() * 3, dtype=facts.dtype, device=facts.device)
    dist.all_gather_into_tensor(table, facts)
    rows = table.view(-1, 3).tolist()
    indices: dict[int, set[int]] = {}  # tp_ep group -> data-parallel indices of its ranks
    replicas: dict[int, list[int]] = {}  # expt_dp group -> its ranks
    for rank, (tp_ep, expt_dp, dp) in enumerate(rows):
        indices.setdefault(tp_ep, set()).add(dp)
        replicas.setdefault(expt_dp, []).append(rank)
    found = None
    for ranks in replicas.values():
        for sharing in share_classes([(rank, indices[rows[rank][0]]) for rank in ranks]):
            if len(sharing) > 1:
                group = _group_of(sharing, groups)
                found = group if dist.get_rank() in sharing else found
    return found


def _group_of(ranks: list[int], groups: Any) -> Any:
    """A process group of these ranks: one of Megatron's if it has one, else a new one; collective over all ranks."""
    known = [getattr(groups, name, None) for name in ("expt_dp", "cp", "tp", "tp_cp", "dp_cp")]
    same = [group for group in known if group is not None and dist.get_process_group_ranks(group) == ranks]
    # All classes have the same shape, so either every rank finds its own class among Megatron's groups or none does.
    every = torch.tensor(int(bool(same) or dist.get_rank() not in ranks), device=collective_device())
    dist.all_reduce(every, dist.ReduceOp.MIN)
    if every.item():
        return same[0] if same else None
    return dist.new_group(ranks)


def share_classes(sources: list[tuple[int, set[int]]]) -> list[list[int]]:
    """Partition [(rank, indices)] into classes of ranks with indices in common; the sorted ranks of each class."""
    classes: list[tuple[list[int], set[int]]] = []
    for rank, indices in sources:
        joined, rest = ([rank], set(indices)), []
        for ranks, known in classes:
            if known & joined[1]:
                joined = (ranks + joined[0], known | joined[1])
            else:
                rest.append((ranks, known))
        classes = [*rest, joined]
    return [sorted(ranks) for ranks, _ in classes]
