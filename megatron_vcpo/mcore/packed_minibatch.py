"""A minibatch as one data-parallel rank sees it: its micro-batches, and the numbers of the whole minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.packing import MicroBatch, PackingPlan, RowAlignment, build_micro_batch, plan_micro_batches
from megatron_vcpo.objective import advantage_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSettings:
    """How trajectories are packed on this layout."""

    budget: int  # tokens of a micro-batch, over all context-parallel ranks
    alignment: RowAlignment = field(default_factory=RowAlignment)
    micro_batch_multiple: int = 1  # the number of micro-batches is a multiple of this
    dp_rank: int = 0
    dp_size: int = 1


@dataclass(slots=True, kw_only=True)
class PackedMinibatch:
    """What one optimizer step consumes, packed for this rank."""

    trajectories: tuple[Trajectory, ...]  # of all data-parallel ranks, in the same order on every rank
    plan: PackingPlan
    micro_batches: list[MicroBatch]  # of this rank
    rewards: Tensor  # [N] fp32
    group_ids: Tensor  # [N] int64
    advantage_scales: Tensor  # [N] fp32
    num_response_tokens: int  # sampled tokens, over all ranks
    rank_rows: tuple[int, ...]  # rows of each data-parallel rank's micro-batches, padding included
    advantages: Tensor | None = None  # [N] fp64, those of --vcpo-advantages
    baselines: Tensor | None = None  # [N], set by a scoring pass

    @property
    def num_trajectories(self) -> int:
        """N, trajectories of all ranks."""
        return len(self.trajectories)

    @property
    def num_rows(self) -> int:
        """Rows of all micro-batches of all ranks, padding included."""
        return sum(self.rank_rows)

    @property
    def num_real_tokens(self) -> int:
        """Tokens of all trajectories, without padding."""
        return sum(t.num_tokens for t in self.trajectories)


def needs_scoring_pass(config: VCPOConfig, plan: PackingPlan) -> bool:
    """Whether a forward-only pass must measure what the baselines need: an optimal baseline whose scope spans
    micro-batches or ranks."""
    if not config.baseline.startswith("opob"):
        # Mean baselines need only the rewards, which every rank has.
        return False
    if config.baseline_scope == "minibatch":
        return len(plan.bins) > 1 or plan.num_micro_batches > 1
    return not plan.groups_together


def pack_minibatch(
    trajectories: Sequence[Trajectory],
    config: VCPOConfig,
    packing: PackingSettings,
    device: torch.device,
) -> PackedMinibatch:
    """Plan and build this rank's micro-batches; every rank must pass the same trajectories.

    Raises:
        PackingError: a trajectory does not fit; the message names it.
        ConfigError: the function of --vcpo-advantages returned anything but one finite number for each trajectory.
    """
    sizes, alignment = [t.num_tokens for t in trajectories], packing.alignment
    plan = plan_micro_batches(
        [alignment.sequence_rows(size) for size in sizes],
        [t.group_id for t in trajectories],
        budget=alignment.sequence_rows(packing.budget),
        dp_size=packing.dp_size,
        multiple=packing.micro_batch_multiple,
        prefer_groups=config.baseline.startswith("opob") and config.baseline_scope == "group",
    )
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32, device=device)
    group_ids = torch.tensor([t.group_id for t in trajectories], dtype=torch.int64, device=device)
    rows = [[alignment.rows([sizes[i] for i in bin_]) for bin_ in rank] for rank in plan.bins]
    if alignment.equal_rows:
        rows = [[max(map(max, rows))] * plan.num_micro_batches] * packing.dp_size
    micro_batches = [
        build_micro_batch(trajectories, bin_, alignment=alignment, rows=total, device=device)
        for bin_, total in zip(plan.bins[packing.dp_rank], rows[packing.dp_rank])
    ]
    lengths = [int(np.count_nonzero(t.response_mask)) for t in trajectories]
    return PackedMinibatch(
        trajectories=tuple(trajectories),
        plan=plan,
        micro_batches=micro_batches,
        rewards=rewards,
        group_ids=group_ids,
        advantage_scales=advantage_scales(rewards, group_ids, config.reward_normalization).float(),
        num_response_tokens=sum(lengths),
        rank_rows=tuple(map(sum, rows)),
    )
