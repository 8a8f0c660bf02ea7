"""The buffer hands out planned minibatches, refuses what cannot be trained on, and survives a resume."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vcpo.data.minibatch import Refusal, RefusalReason
from megatron_vcpo.flow.buffer import TrajectoryBuffer
from megatron_vcpo.flow.resume import as_arrays, as_tensors
from tests.oracle.trajectories import assert_same, trajectories, trajectory

MINIBATCHES = st.lists(st.lists(trajectories(), max_size=4), max_size=4)


def versions(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_minibatches_leave_in_the_order_they_were_planned():
    buffer = TrajectoryBuffer(max_lag=5)
    assert buffer.add([[trajectory(group_id=0), trajectory(group_id=1)], [trajectory(group_id=2)]]) == []
    assert buffer.add([[trajectory(group_id=3)]]) == []
    assert len(buffer) == 3
    taken = [[t.group_id for t in buffer.take(version=0).trajectories] for _ in range(3)]
    assert taken == [[0, 1], [2], [3]]
    with pytest.raises(IndexError):
        buffer.take(version=0)


def test_a_trajectory_is_as_old_as_its_oldest_token():
    buffer = TrajectoryBuffer(max_lag=2)
    buffer.add([[trajectory(index=0, versions=versions(4, 3, 4)), trajectory(index=1, versions=versions(4, 4, 4))]])
    taken = buffer.take(version=5)
    assert taken.lags == (2, 1)
    assert taken.refused == ()


@pytest.mark.parametrize(("version", "kept"), [(0, 3), (2, 3), (3, 2), (4, 1)])
def test_what_is_older_than_the_bound_is_refused_and_counted(version, kept):
    buffer = TrajectoryBuffer(max_lag=2)
    empty = trajectory(
        index=2,
        response_ids=np.zeros(0, np.int32),
        behavior_logprobs=np.zeros(0, np.float32),
        versions=versions(),
        response_mask=np.zeros(0, np.bool_),
    )
    buffer.add(
        [[trajectory(index=0, versions=versions(0, 1, 1)), trajectory(index=1, versions=versions(1, 1, 1)), empty]]
    )
    taken = buffer.take(version=version)
    assert len(taken.trajectories) == len(taken.lags) == kept
    assert [refusal.reason for refusal in taken.refused] == [RefusalReason.STALE] * (3 - kept)
    assert all(lag <= 2 for lag in taken.lags)
    assert any(t is empty for t in taken.trajectories)  # it holds nothing stale


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"behavior_logprobs": np.array([-1, np.nan, -1], np.float32)}, "1 behaviour log-probs are not finite"),
        ({"behavior_logprobs": np.array([-1, -np.inf, np.inf], np.float32)}, "2 behaviour log-probs are not finite"),
        ({"behavior_logprobs": np.zeros(2, np.float32)}, "behavior_logprobs has 2 entries for 3 response tokens"),
        ({"versions": versions(0)}, "versions has 1 entries for 3 response tokens"),
        ({"response_mask": np.ones(4, np.bool_)}, "response_mask has 4 entries for 3 response tokens"),
        ({"prompt_ids": np.zeros(0, np.int32)}, "the prompt is empty"),
        ({"reward": float("nan")}, "the reward is nan"),
        ({"routed_experts": np.zeros((4, 1, 2), np.uint8)}, "routed_experts has 4 rows for 5 tokens"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_at_the_door_by_name(changes, said):
    buffer = TrajectoryBuffer(max_lag=0)
    refused = buffer.add([[trajectory(index=0), trajectory(index=1, group_id=7, **changes)]])
    assert refused == [Refusal(reason=RefusalReason.UNFIT, sentence=f"group 7 response 1: {said}")]
    assert [t.index for t in buffer.take(version=0).trajectories] == [0]


def test_a_trajectory_is_as_old_as_its_oldest_token_that_the_policy_sampled():
    buffer = TrajectoryBuffer(max_lag=0)
    mask = np.array([True, False, True])
    buffer.add(
        [
            [
                trajectory(index=0, versions=versions(4, 0, 4), response_mask=mask),  # the old one is a tool's
                trajectory(index=1, versions=versions(4, 4, 3), response_mask=mask),
            ]
        ]
    )
    taken = buffer.take(version=4)
    assert [t.index for t in taken.trajectories] == [0]
    assert [refusal.sentence for refusal in taken.refused] == [
        "group 0 response 1: its oldest token has age 1, and --rollout-max-lag is 0"
    ]


def test_tokens_the_policy_did_not_sample_need_no_logprob():
    masked = trajectory(
        behavior_logprobs=np.array([-1, np.nan, -1], np.float32), response_mask=np.array([True, False, True])
    )
    assert TrajectoryBuffer(max_lag=0).add([[masked]]) == []


@given(MINIBATCHES)
def test_saved_state_restores_every_minibatch_exactly(minibatches):
    buffer, restored = TrajectoryBuffer(max_lag=3), TrajectoryBuffer(max_lag=3)
    buffer.add(minibatches)
    restored.add([[trajectory()]])  # replaced by the state
    restored.load_state_dict(as_arrays(as_tensors(buffer.state_dict())))
    assert len(restored) == len(buffer)
    while len(buffer):
        ours, theirs = buffer.take(version=10), restored.take(version=10)
        assert (ours.lags, ours.refused) == (theirs.lags, theirs.refused)
        for first, second in zip(ours.trajectories, theirs.trajectories, strict=True):
            assert_same(first, second)


@given(MINIBATCHES, st.integers(0, 30), st.integers(0, 5))
def test_nothing_is_lost_uncounted_and_nothing_too_old_gets_through(minibatches, version, max_lag):
    buffer = TrajectoryBuffer(max_lag=max_lag)
    refused = len(buffer.add(minibatches))
    taken = [buffer.take(version) for _ in range(len(buffer))]
    kept = [t for minibatch in taken for t in minibatch.trajectories]
    assert len(kept) + refused + sum(len(m.refused) for m in taken) == sum(map(len, minibatches))
    sampled = [t.versions[t.response_mask] for t in kept]
    assert all(version - int(versions.min()) <= max_lag for versions in sampled if len(versions))


def test_what_was_put_back_comes_next_and_is_as_old_as_before_also_after_a_resume():
    buffer, restored = TrajectoryBuffer(max_lag=2), TrajectoryBuffer(max_lag=2)
    buffer.add([[trajectory(group_id=0, versions=versions(1, 1, 1))], [trajectory(group_id=1)]])
    first = buffer.take(version=3)
    assert (first.retries, first.lags) == (0, (2,))
    buffer.put_back(dataclasses.replace(first, retries=1))
    restored.load_state_dict(as_arrays(as_tensors(buffer.state_dict())))
    for same in (buffer, restored):
        assert len(same) == 2
        again = same.take(version=3)
        assert (again.retries, again.lags, again.refused) == (1, (2,), ())
        assert_same(first.trajectories[0], again.trajectories[0])
        following = same.take(version=0)
        assert (following.retries, [t.group_id for t in following.trajectories]) == (0, [1])
