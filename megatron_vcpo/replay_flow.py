"""Routing replay between a rollout phase and the buffer: routes of the trainer's own, and what replay is worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_vcpo.mcore.policy_step import ForwardBackward, PolicyStep
from megatron_vcpo.mcore.reductions import group_size
from megatron_vcpo.mcore.route_books import recorded_routes
from megatron_vcpo.rollout.exchange import exchange_trajectories
from megatron_vcpo.rollout.trajectory import Float32Array, Trajectory


def with_trainer_routes(
    minibatches: Sequence[Sequence[Trajectory]],
    *,
    step: PolicyStep,
    model: list[Any],
    forward_backward: ForwardBackward,
    num_experts: int,
    device: torch.device,
) -> list[list[Trajectory]]:
    """The same trajectories with the routes that the trainer's routers choose now; collective over all ranks.

    For --rollout-router-replay training (R2): one forward-only pass when a phase's trajectories arrive, so that all
    steps they feed route them as the policy did that began with them.
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
    replayed: Mapping[int, Float32Array],
    probe: Sequence[Trajectory],
    *,
    step: PolicyStep,
    model: list[Any],
    forward_backward: ForwardBackward,
    device: torch.device,
) -> dict[str, float]:
    """Mean |trainer - engine| log-prob, in nats a token, with and without replay; equal on every rank.

    Args:
        replayed: the trainer's log-probs of `probe` under replay, as `PolicyStep.logprobs_of` returned them.
        probe: trajectories that the engine made with the trainer's present weights.
        step: scores them once more, every router for itself.
        model: Megatron's list of model chunks.
        forward_backward: Megatron's schedule.
        device: for the one reduction.
    """
    assert step.replay is not None
    with step.replay.suspended():
        alone = step.logprobs_of(probe, model=model, forward_backward=forward_backward)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for place, values in enumerate((replayed, alone)):
        for index, logprobs in values.items():
            difference = np.abs(logprobs.astype(np.float64) - probe[index].behavior_logprobs)
            sums[place] += float(difference.sum())
            sums[2] += 0.5 * difference.size
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    with_replay, without, tokens = sums.tolist()
    return {
        "mismatch_with_replay": with_replay / max(tokens, 1.0),
        "mismatch_without_replay": without / max(tokens, 1.0),
    }
