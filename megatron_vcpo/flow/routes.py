"""Routing replay before the buffer: the trainer's own routes, and how much replay reduces the mismatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_vcpo.data.exchange import exchange_trajectories
from megatron_vcpo.data.trajectory import Float32Array, Trajectory
from megatron_vcpo.mcore.reductions import group_size
from megatron_vcpo.mcore.routers.accounting import recorded_routes
from megatron_vcpo.mcore.step.policy_step import ForwardBackward, PolicyStep
from megatron_vcpo.objective import kl_estimate


def with_trainer_routes(
    minibatches: Sequence[Sequence[Trajectory]],
    *,
    step: PolicyStep,
    model: list[Any],
    forward_backward: ForwardBackward,
    num_experts: int,
    device: torch.device,
) -> list[list[Trajectory]]:
    """The trajectories with the routes that the trainer's routers choose now; collective over all ranks.

    For --rollout-router-replay training (R2): one forward-only pass when a phase's trajectories arrive, so that all
    steps route them as the policy did at that time.
    """
    trajectories = [t for minibatch in minibatches for t in minibatch]
    if not trajectories:
        return [list(minibatch) for minibatch in minibatches]
    assert step.replay is not None
    with step.replay.recording():
        step.logprobs_of(trajectories, model=model, forward_backward=forward_backward)
        routes = recorded_routes(step.replay, trajectories, num_experts)
    groups = (step.groups.tp, step.groups.cp, step.groups.pp)
    hands_in = all(group_size(group) == 1 or dist.get_rank(group) == 0 for group in groups)
    own = [dataclasses.replace(trajectories[i], routed_experts=found) for i, found in routes.items()]
    complete = exchange_trajectories(own if hands_in else [], device=device)
    found_by_name = {(t.group_id, t.index): t for t in complete}
    return [[found_by_name[t.group_id, t.index] for t in minibatch] for minibatch in minibatches]


def mismatch_with_and_without(
    trajectories: Sequence[Trajectory],
    *,
    step: PolicyStep,
    model: list[Any],
    forward_backward: ForwardBackward,
    device: torch.device,
) -> dict[str, float]:
    """Mismatch of trainer and engine, with replay and with the routers' own choice; equal on every rank.

    Two forward-only passes, collective over all ranks.

    Args:
        trajectories: sampled by the engine with the trainer's current weights.
        step: scores them.
        model: Megatron's list of model chunks.
        forward_backward: Megatron's schedule.
        device: for the reduction.

    Returns:
        mismatch_abs_replay, mismatch_abs_no_replay: mean absolute difference of log-probs, nats a token;
        mismatch_kl_replay, mismatch_kl_no_replay: KL by the estimator k3, nats a token.
    """
    if not trajectories:
        return {}
    assert step.replay is not None
    replayed = step.logprobs_of(trajectories, model=model, forward_backward=forward_backward)
    with step.replay.suspended():
        alone = step.logprobs_of(trajectories, model=model, forward_backward=forward_backward)
    sums = torch.zeros(2, 3, dtype=torch.float64, device=device)  # rows: with, without; columns: distance, k3, tokens
    for place, values in enumerate((replayed, alone)):
        for index, logprobs in values.items():
            sums[place] += _mismatch(logprobs, trajectories[index]).to(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)  # tensor-parallel ranks repeat the same trajectories, which changes no mean
    means = (sums[:, :2] / sums[:, 2:].clamp(min=1.0)).tolist()
    return {
        f"mismatch_{kind}_{name}": means[place][column]
        for place, name in enumerate(("replay", "no_replay"))
        for column, kind in enumerate(("abs", "kl"))
    }


def _mismatch(policy: Float32Array, trajectory: Trajectory) -> torch.Tensor:
    """Sums over a trajectory's sampled tokens: [absolute difference, k3, tokens]."""
    mask = trajectory.response_mask
    ours, theirs = (torch.from_numpy(x[mask]).double() for x in (policy, trajectory.behavior_logprobs))
    k3 = kl_estimate(theirs, ours, "k3")
    return torch.stack([(ours - theirs).abs().sum(), k3.sum(), torch.tensor(k3.numel()).double()])
