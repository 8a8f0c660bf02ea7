"""Trajectory: the record that flows from the engine to the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_vcpo.data.routes import RouteArray

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One response to one prompt, with everything the loss needs. Never mutated.

    P is the prompt's length, L the response's (0 is legal).

    Example:
        >>> Trajectory(prompt_ids=np.array([5, 9], np.int32), response_ids=np.array([7], np.int32),
        ...            behavior_logprobs=np.array([-0.3], np.float32), versions=np.array([4], np.int32),
        ...            response_mask=np.array([True]), reward=1.0, group_id=12, index=0)
    """

    prompt_ids: Int32Array  # [P]
    response_ids: Int32Array  # [L]
    behavior_logprobs: Float32Array  # [L] under the distribution that each token was actually drawn from, in nats
    versions: Int32Array  # [L] policy version (optimizer steps taken) that sampled the token
    response_mask: BoolArray  # [L] False on tokens the policy did not sample (tool output)
    reward: float
    group_id: int  # running number of the drawn prompt, shared by all responses to it
    index: int  # number of the response within its group
    truncated: bool = False  # the response reached the length bound
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    prompt_index: int = -1  # index of the prompt in its environment
    routed_experts: RouteArray | None = None  # [P + L, layers with experts, k], see data/routes.py

    @property
    def name(self) -> str:
        """Name of this trajectory in messages."""
        return f"group {self.group_id} response {self.index}"

    @property
    def num_tokens(self) -> int:
        """Number of tokens in a packed micro-batch: P + L."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def finite(self) -> bool:
        """Whether its reward and the log-probs of its sampled tokens are finite; otherwise it is never trained on."""
        return bool(np.isfinite(self.reward) and np.isfinite(self.behavior_logprobs[self.response_mask]).all())

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token; a large number if none was sampled, since nothing can be stale then."""
        sampled = self.versions[self.response_mask]
        return int(sampled.min()) if len(sampled) else np.iinfo(np.int32).max
