"""Trajectories as a few flat arrays, to save with a checkpoint and to send between ranks.

A column concatenates the values of all trajectories, and a second array holds the offsets. So nothing is pickled, and
the number of arrays does not grow with the number of trajectories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_vcpo.data.routes import RouteArray
from megatron_vcpo.data.trajectory import Trajectory

Columns = dict[str, np.ndarray[Any, Any]]

# Ragged columns: field of Trajectory -> dtype. All of them except the prompt share response_offsets.
_RESPONSE = {
    "response_ids": np.int32,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
    "response_mask": np.bool_,
}
_SCALARS = {
    "reward": np.float64,
    "group_id": np.int64,
    "index": np.int32,
    "truncated": np.bool_,
    "prompt_index": np.int64,
}


def pack_trajectories(trajectories: Sequence[Trajectory]) -> Columns:
    """Flat arrays of any number of trajectories, in order; `unpack_trajectories` is the exact inverse."""
    columns: Columns = {
        "prompt_offsets": _offsets([len(t.prompt_ids) for t in trajectories]),
        "response_offsets": _offsets([len(t.response_ids) for t in trajectories]),
        "prompt_ids": _joined([t.prompt_ids for t in trajectories], np.int32),
    }
    for name, dtype in _RESPONSE.items():
        columns[name] = _joined([getattr(t, name) for t in trajectories], dtype)
    for name, dtype in _SCALARS.items():
        columns[name] = np.array([getattr(t, name) for t in trajectories], dtype=dtype)
    columns |= _pack_routes(trajectories)
    parts = json.dumps([dict(t.reward_parts) for t in trajectories]).encode()
    columns["reward_parts"] = np.frombuffer(parts, dtype=np.uint8).copy()
    return columns


def unpack_trajectories(columns: Mapping[str, np.ndarray[Any, Any]]) -> list[Trajectory]:
    """The trajectories that `pack_trajectories` was given; arrays are views into the columns."""
    prompts, responses = columns["prompt_offsets"].tolist(), columns["response_offsets"].tolist()
    parts = json.loads(bytes(columns["reward_parts"].tobytes()))
    routes = _unpack_routes(columns)
    out = []
    for i in range(len(prompts) - 1):
        span = slice(responses[i], responses[i + 1])
        fields: dict[str, Any] = {name: columns[name][span] for name in _RESPONSE}
        fields |= {name: columns[name][i].item() for name in _SCALARS}
        out.append(
            Trajectory(
                prompt_ids=columns["prompt_ids"][prompts[i] : prompts[i + 1]],
                reward_parts=parts[i],
                routed_experts=routes[i],
                **fields,
            )
        )
    return out


def _pack_routes(trajectories: Sequence[Trajectory]) -> Columns:
    """Routes as bytes: their dtype differs between models, while a column's dtype must be the same on all ranks."""
    routes = [t.routed_experts for t in trajectories]
    layouts = {(*r.shape[1:], r.itemsize) for r in routes if r is not None}
    if len(layouts) > 1:
        raise ValueError(f"Routes of different models cannot be packed together: (layers, k, bytes) {sorted(layouts)}.")
    return {
        "route_rows": np.array([0 if r is None else len(r) for r in routes], dtype=np.int64),
        "route_layout": np.array(next(iter(layouts), (0, 0, 0)), dtype=np.int64),
        "routed_experts": _joined([r.reshape(-1).view(np.uint8) for r in routes if r is not None], np.uint8),
    }


def _unpack_routes(columns: Mapping[str, np.ndarray[Any, Any]]) -> list[RouteArray | None]:
    layers, k, itemsize = columns["route_layout"].tolist()
    ends = np.cumsum(columns["route_rows"]) * (layers * k * itemsize)
    dtype: Any = np.uint8 if itemsize == 1 else np.int16
    out: list[RouteArray | None] = []
    for rows, end in zip(columns["route_rows"].tolist(), ends.tolist()):
        start = end - rows * layers * k * itemsize
        piece: RouteArray = columns["routed_experts"][start:end].view(dtype)
        out.append(piece.reshape(rows, layers, k) if rows else None)
    return out


def _offsets(lengths: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _joined(arrays: Sequence[np.ndarray[Any, Any]], dtype: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)
