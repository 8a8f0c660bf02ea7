"""TrajectoryBuffer: minibatches waiting between engine and trainer, with a hard bound on their age."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_vcpo.data.columns import pack_trajectories, unpack_trajectories
from megatron_vcpo.data.minibatch import Minibatch, Refusal, RefusalReason
from megatron_vcpo.data.trajectory import Trajectory


class TrajectoryBuffer:
    """Planned minibatches, in order. Nothing is dropped silently: refusals are counted by reason."""

    def __init__(self, *, max_lag: int) -> None:
        """Args: max_lag: largest age of a sampled token, in optimizer steps."""
        self.max_lag = max_lag
        self._minibatches: deque[Minibatch] = deque()

    def __len__(self) -> int:
        return len(self._minibatches)

    def add(self, minibatches: Sequence[Sequence[Trajectory]]) -> list[Refusal]:
        """Append planned minibatches, leaving out trajectories that cannot be trained on; those are returned."""
        refused = []
        for minibatch in minibatches:
            kept = []
            for trajectory in minibatch:
                problem = defect(trajectory)
                if problem:
                    refused.append(Refusal(reason=RefusalReason.UNFIT, sentence=f"{trajectory.name}: {problem}"))
                else:
                    kept.append(trajectory)
            self._minibatches.append(Minibatch(trajectories=tuple(kept)))
        return refused

    def take(self, version: int) -> Minibatch:
        """Remove and return the next minibatch, without trajectories that are too old for the policy's `version`.

        Raises:
            IndexError: the buffer is empty.
        """
        waiting = self._minibatches.popleft()
        lags = [max(0, version - t.oldest_version) for t in waiting.trajectories]
        aged = list(zip(waiting.trajectories, lags))
        kept = [(t, lag) for t, lag in aged if lag <= self.max_lag]
        return Minibatch(
            trajectories=tuple(t for t, _ in kept),
            lags=tuple(lag for _, lag in kept),
            refused=tuple(self._stale(t, lag) for t, lag in aged if lag > self.max_lag),
            retries=waiting.retries,
        )

    def _stale(self, trajectory: Trajectory, lag: int) -> Refusal:
        return Refusal(
            reason=RefusalReason.STALE,
            sentence=f"{trajectory.name}: its oldest token has age {lag}, and --rollout-max-lag is {self.max_lag}",
        )

    def put_back(self, minibatch: Minibatch) -> None:
        """Make a minibatch that was just taken the next one again."""
        self._minibatches.appendleft(replace(minibatch, lags=(), refused=()))

    def state_dict(self) -> dict[str, Any]:
        """All waiting minibatches, as flat arrays."""
        return {
            "sizes": np.array([len(m.trajectories) for m in self._minibatches], dtype=np.int64),
            "retries": self._minibatches[0].retries if self._minibatches else 0,  # the others were never tried
            "columns": pack_trajectories([t for m in self._minibatches for t in m.trajectories]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents by a saved state."""
        trajectories = iter(unpack_trajectories(state["columns"]))
        self._minibatches = deque(
            Minibatch(trajectories=tuple(next(trajectories) for _ in range(int(size)))) for size in state["sizes"]
        )
        retries = int(state.get("retries", 0))  # missing in checkpoints of version 0.1
        if retries:
            self._minibatches[0] = replace(self._minibatches[0], retries=retries)


def defect(trajectory: Trajectory) -> str:
    """Why a trajectory cannot be trained on; '' if it can."""
    length = len(trajectory.response_ids)
    for name in ("behavior_logprobs", "versions", "response_mask"):
        if len(getattr(trajectory, name)) != length:
            return f"{name} has {len(getattr(trajectory, name))} entries for {length} response tokens"
    if not len(trajectory.prompt_ids):
        return "the prompt is empty"
    routes = trajectory.routed_experts
    if routes is not None and len(routes) != trajectory.num_tokens:
        return f"routed_experts has {len(routes)} rows for {trajectory.num_tokens} tokens"
    sampled = trajectory.behavior_logprobs[trajectory.response_mask]
    if not np.isfinite(sampled).all():
        return f"{int((~np.isfinite(sampled)).sum())} behaviour log-probs are not finite"
    if not abs(trajectory.reward) <= float(np.finfo(np.float32).max):  # NaN fails too
        return f"the reward is {trajectory.reward}"
    return ""
