"""Read a finished pass's sheets: how far routers agree with the replayed routes, and which routes were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vcpo.data.routes import RouteArray, compact_routes
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.packing import MicroBatch
from megatron_vcpo.mcore.reductions import group_size, sum_over
from megatron_vcpo.mcore.routers.replay import RouterReplay, RouteSheet


def route_metrics(replay: RouterReplay, trajectories: Sequence[Trajectory], device: torch.device) -> dict[str, float]:
    """Agreement in the training pass that just finished; the same on every rank, collective over tp, cp, dp and pp.

    Args:
        replay: its `finished` sheets are read.
        trajectories: the whole minibatch.
        device: for the collectives.

    Returns:
        route_agreement/layer_<k>: share of replayed tokens for which layer k (from 0) would itself have chosen the same
            experts.
        route_disagree_tokens: share of replayed tokens for which some layer would have chosen other experts.
        route_missing: share of tokens that came without routes and were routed by the trainer; a trajectory's last
            token, which no engine processes and nothing depends on, is not counted.
    """
    layers = torch.zeros(replay.num_layers, 2, dtype=torch.float64, device=device)
    for sheet in replay.finished:
        for layer, counts in sheet.agreement.items():
            layers[layer] += counts
    differs, known, last = _row_flags(replay, trajectories)
    tokens = torch.stack([differs.sum(), known.sum(), (known & ~last).sum()]).double()
    groups = [replay.groups.dp_cp, *([replay.groups.tp] if replay.config.sequence_parallel else [])]
    for group in groups:
        sum_over(tokens, group)
        sum_over(layers, group)
    sum_over(layers, replay.groups.pp)
    differing, replayed, needed = tokens.tolist()
    expected = sum(max(0, t.num_tokens - 1) for t in trajectories)
    shares = {
        f"route_agreement/layer_{number - 1}": agreeing / total
        for number, (agreeing, total) in zip(replay.layer_numbers, layers.tolist())
        if total
    }
    return {
        **shares,
        "route_disagree_tokens": differing / max(1.0, replayed),
        "route_missing": (expected - needed) / max(1, expected),
    }


def _row_flags(replay: RouterReplay, trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of this rank, three flags: some layer of some stage would have chosen other experts, there were
    routes, and the row is the last token of its trajectory."""
    differs: dict[int, Tensor] = {}
    known: dict[int, Tensor] = {}
    last: dict[int, Tensor] = {}
    for sheet in replay.finished:  # one sheet for each micro-batch and model chunk
        key = id(sheet.micro_batch)
        empty = torch.zeros(len(sheet.rows), dtype=torch.bool, device=sheet.rows.device)
        differs[key] = differs.get(key, empty) | (empty if sheet.differs is None else sheet.differs)
        known[key] = empty if sheet.routes is None else sheet.routes[:, 0, 0] >= 0
        last[key] = _last_tokens(sheet.micro_batch, trajectories)[sheet.rows]
    flags = torch.cat(list(differs.values()))
    if group_size(replay.groups.pp) > 1:
        everywhere = flags.to(torch.uint8)
        dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=replay.groups.pp)
        flags = everywhere.bool()
    return flags, torch.cat(list(known.values())), torch.cat(list(last.values()))


def _last_tokens(micro: MicroBatch, trajectories: Sequence[Trajectory]) -> Tensor:
    """[T] bool: rows that hold the last token of a trajectory."""
    ends = [start + trajectories[index].num_tokens - 1 for index, start in zip(micro.indices, micro.starts)]
    flags = torch.zeros(micro.num_rows, dtype=torch.bool)
    flags[torch.tensor(ends, dtype=torch.int64)] = True
    return flags.to(micro.tokens.device)


def recorded_routes(
    replay: RouterReplay, trajectories: Sequence[Trajectory], num_experts: int
) -> dict[int, RouteArray]:
    """Routes of this data-parallel rank's trajectories, from the `finished` sheets of a recording pass.

    Collective over tp, cp and pp, whose ranks all get the same result.

    Returns:
        Index in `trajectories` -> [P + L, layers, k].
    """
    found: dict[int, RouteArray] = {}
    sheets: dict[int, list[RouteSheet]] = {}
    for sheet in replay.finished:
        sheets.setdefault(id(sheet.micro_batch), []).append(sheet)
    for parts in sheets.values():
        micro = parts[0].micro_batch
        whole = _whole_record(micro, parts, replay.groups).cpu().numpy()
        for index, start in zip(micro.indices, micro.starts):
            tokens = trajectories[index].num_tokens
            rows: np.ndarray[Any, Any] = whole[start : start + tokens]
            found[index] = compact_routes(rows, num_experts=num_experts, rows=tokens)
    return found


def _whole_record(micro: MicroBatch, parts: Sequence[RouteSheet], groups: Any) -> Tensor:
    """[T, layers, k] over all layers and rows, assembled from what each rank and chunk recorded."""
    record = parts[0].record
    assert record is not None
    whole = torch.full((micro.num_rows, *record.shape[1:]), -1, dtype=torch.int32, device=record.device)
    for part in parts:
        assert part.record is not None
        whole[part.rows] = torch.maximum(whole[part.rows], part.record)
    for group in (groups.tp, groups.cp, groups.pp):
        if group_size(group) > 1:
            dist.all_reduce(whole, dist.ReduceOp.MAX, group=group)
    return whole
