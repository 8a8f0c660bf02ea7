"""Packing trajectories into flat arrays loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vcpo.data.columns import pack_trajectories, unpack_trajectories
from tests.oracle.trajectories import assert_same, trajectories, trajectory


@given(st.lists(trajectories(), max_size=6))
def test_round_trip_is_exact_to_the_bit(originals):
    restored = unpack_trajectories(pack_trajectories(originals))
    assert len(restored) == len(originals)
    for original, copy in zip(originals, restored, strict=True):
        assert_same(original, copy)


@given(st.lists(trajectories(), max_size=6))
def test_columns_are_plain_arrays_whose_number_does_not_grow(originals):
    columns = pack_trajectories(originals)
    assert columns.keys() == pack_trajectories([]).keys()
    assert all(isinstance(column, np.ndarray) and column.dtype != object for column in columns.values())
    assert {name: column.dtype for name, column in columns.items()} == {
        name: column.dtype for name, column in pack_trajectories([]).items()
    }


def test_routes_of_many_experts_take_two_bytes_each_and_one_model_is_not_mixed_with_another():
    wide = np.arange(5 * 2 * 8, dtype=np.int16).reshape(5, 2, 8) + 300
    wide[3] = -1
    originals = [trajectory(routed_experts=wide[:, ::-1]), trajectory(), trajectory(routed_experts=wide + 1)]
    columns = pack_trajectories(originals)
    assert columns["routed_experts"].nbytes == 2 * wide.nbytes
    for original, copy in zip(originals, unpack_trajectories(columns), strict=True):
        assert_same(original, copy)
    with pytest.raises(ValueError, match="different models"):
        pack_trajectories([originals[0], trajectory(routed_experts=wide.astype(np.uint8))])
