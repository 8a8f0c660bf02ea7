"""TrajectoryBuffer: minibatches between the engine and the trainer, with a hard bound on their age."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vcpo.data.columns import pack_trajectories, unpack_trajectories
from megatron_vcpo.data.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One minibatch as it leaves the buffer."""

    trajectories: tuple[Trajectory, ...]
    lags: tuple[int, ...]  # age of each trajectory's oldest token, in optimizer steps
    refused_stale: int  # trajectories that were older than allowed and are gone
    retries: int = 0  # how often it was put back


class TrajectoryBuffer:
    """Planned minibatches in order. Nothing is dropped silently: what is refused is counted by its reason."""

    def __init__(self, *, max_lag: int) -> None:
        """Args: max_lag: largest age of a token, in optimizer steps."""
        self.max_lag = max_lag
        self._minibatches: deque[tuple[Trajectory, ...]] = deque()
        self._retries = 0  # of the first minibatch; the others have not been taken yet

    def __len__(self) -> int:
        return len(self._minibatches)

    def add(self, minibatches: Sequence[Sequence[Trajectory]]) -> list[str]:
        """Take planned minibatches, leaving out trajectories that cannot be trained on.

        Returns:
            One sentence for each trajectory that was refused: which, and why.
        """
        refused = []
        for minibatch in minibatches:
            kept = []
            for trajectory in minibatch:
                problem = defect(trajectory)
                if problem:
                    refused.append(f"{trajectory.name}: {problem}")
                else:
                    kept.append(trajectory)
            self._minibatches.append(tuple(kept))
        return refused

    def take(self, version: int) -> Taken:
        """The next minibatch, without trajectories that are too old for the policy's `version`.

        Raises:
            IndexError: the buffer is empty.
        """
        minibatch, retries = self._minibatches.popleft(), self._retries
        self._retries = 0
        lags = [max(0, version - t.oldest_version) for t in minibatch]
        kept = [(t, lag) for t, lag in zip(minibatch, lags) if lag <= self.max_lag]
        return Taken(
            trajectories=tuple(t for t, _ in kept),
            lags=tuple(lag for _, lag in kept),
            refused_stale=len(minibatch) - len(kept),
            retries=retries,
        )

    def put_back(self, trajectories: Sequence[Trajectory], *, retries: int) -> None:
        """Make a minibatch that was just taken the next one again.

        Args:
            trajectories: those that were taken.
            retries: how often it has been put back, this time included.
        """
        self._minibatches.appendleft(tuple(trajectories))
        self._retries = retries

    def state_dict(self) -> dict[str, Any]:
        """Everything waiting, as flat arrays."""
        return {
            "sizes": np.array([len(m) for m in self._minibatches], dtype=np.int64),
            "retries": self._retries,
            "columns": pack_trajectories([t for m in self._minibatches for t in m]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents by a saved state."""
        trajectories = iter(unpack_trajectories(state["columns"]))
        self._minibatches = deque(tuple(next(trajectories) for _ in range(int(size))) for size in state["sizes"])
        self._retries = int(state.get("retries", 0))  # a checkpoint of version 0.1 has none


def defect(trajectory: Trajectory) -> str:
    """Why a trajectory cannot be trained on; empty when it can."""
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
    if not abs(trajectory.reward) <= float(np.finfo(np.float32).max):  # NaN fails it too
        return f"the reward is {trajectory.reward}"
    return ""
