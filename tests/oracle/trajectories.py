"""Random trajectories and their exact comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from megatron_vcpo.data.trajectory import Trajectory


def trajectory(**changes: Any) -> Trajectory:
    """A plain one: two prompt tokens, three response tokens of version 0."""
    fields: dict[str, Any] = {
        "prompt_ids": np.array([5, 6], np.int32),
        "response_ids": np.array([7, 8, 1], np.int32),
        "behavior_logprobs": np.array([-0.5, -1.0, -0.1], np.float32),
        "versions": np.zeros(3, np.int32),
        "response_mask": np.ones(3, np.bool_),
        "reward": 1.0,
        "group_id": 0,
        "index": 0,
    }
    return Trajectory(**fields | changes)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any one that may enter a buffer: empty responses, odd rewards and names of parts included."""
    prompt, response = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    finite = st.floats(allow_nan=False, allow_infinity=False)
    return Trajectory(
        prompt_ids=draw(st_numpy.arrays(np.int32, prompt)),
        response_ids=draw(st_numpy.arrays(np.int32, response)),
        behavior_logprobs=draw(
            st_numpy.arrays(np.float32, response, elements=st.floats(max_value=0, allow_infinity=False, width=32))
        ),
        versions=draw(st_numpy.arrays(np.int32, response, elements=st.integers(0, 20))),
        response_mask=draw(st_numpy.arrays(np.bool_, response)),
        reward=draw(finite),
        group_id=draw(st.integers(0, 2**40)),
        index=draw(st.integers(0, 1000)),
        truncated=draw(st.booleans()),
        reward_parts=draw(st.dictionaries(st.text(max_size=8), finite, max_size=3)),
        prompt_index=draw(st.integers(-1, 2**40)),
        routed_experts=draw(
            st.none() | st_numpy.arrays(np.uint8, (prompt + response, 3, 2), elements=st.integers(0, 255))
        ),
    )


def assert_same(first: Trajectory, second: Trajectory) -> None:
    """Equal to the bit, dtypes included."""
    for name in ("prompt_ids", "response_ids", "behavior_logprobs", "versions", "response_mask"):
        a, b = getattr(first, name), getattr(second, name)
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
        assert len(a) == len(b)
    routes = (first.routed_experts, second.routed_experts)
    if routes[0] is None or routes[1] is None:
        assert routes == (None, None)
    else:
        assert routes[0].dtype == routes[1].dtype
        np.testing.assert_array_equal(*routes)
    for name in ("reward", "group_id", "index", "truncated", "prompt_index", "reward_parts"):
        a, b = getattr(first, name), getattr(second, name)
        assert a == b
        assert type(a) is type(b)
