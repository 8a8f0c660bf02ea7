"""Packing trajectories into flat arrays loses nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vcpo.rollout.columns import pack_trajectories, unpack_trajectories
from tests.oracle.trajectories import assert_same, trajectories


@settings(deadline=None)
@given(st.lists(trajectories(), max_size=6))
def test_round_trip_is_exact_to_the_bit(originals):
    restored = unpack_trajectories(pack_trajectories(originals))
    assert len(restored) == len(originals)
    for original, copy in zip(originals, restored, strict=True):
        assert_same(original, copy)


@settings(deadline=None)
@given(st.lists(trajectories(), max_size=6))
def test_columns_are_plain_arrays_whose_number_does_not_grow(originals):
    columns = pack_trajectories(originals)
    assert columns.keys() == pack_trajectories([]).keys()
    assert all(isinstance(column, np.ndarray) and column.dtype != object for column in columns.values())
    assert {name: column.dtype for name, column in columns.items()} == {
        name: column.dtype for name, column in pack_trajectories([]).items()
    }
