"""Packed sums, with empty segments, padding and groups."""

import torch

from megatron_vcpo.objective import dense_ids, segment_ids, segment_max, segment_min, segment_sum, spread


def test_positions_belong_to_their_trajectory_with_empty_ones_skipped_and_padding_to_none():
    cu_seqlens = torch.tensor([0, 0, 3, 3, 5], dtype=torch.int32)
    assert segment_ids(cu_seqlens, 7).tolist() == [1, 1, 1, 3, 3, 4, 4]


def test_sums_leave_padding_out_even_when_it_is_nan():
    ids = segment_ids(torch.tensor([0, 2, 2, 3]), 5)
    values = torch.tensor([1.0, 2.0, 4.0, torch.nan, torch.inf])
    assert segment_sum(values, ids, 3).tolist() == [3.0, 0.0, 4.0]


def test_no_trajectories_and_no_positions_are_legal():
    ids = segment_ids(torch.tensor([0]), 2)
    assert segment_sum(torch.ones(2), ids, 0).tolist() == []
    assert spread(torch.zeros(0), ids).tolist() == [0.0, 0.0]
    assert segment_ids(torch.tensor([0, 0]), 0).tolist() == []


def test_spread_gives_positions_their_trajectorys_value_and_padding_zero():
    ids = segment_ids(torch.tensor([0, 2, 3]), 4)
    assert spread(torch.tensor([5.0, 7.0]), ids).tolist() == [5.0, 5.0, 7.0, 0.0]


def test_extremes_of_groups_are_found_in_any_order():
    ids = torch.tensor([1, 0, 1])
    values = torch.tensor([3.0, -2.0, 4.0])
    assert segment_max(values, ids, 3).tolist() == [-2.0, 4.0, -torch.inf]
    assert segment_min(values, ids, 3).tolist() == [-2.0, 3.0, torch.inf]


def test_arbitrary_group_ids_are_renumbered():
    dense, count = dense_ids(torch.tensor([1 << 60, -5, 1 << 60, 3]))
    assert count == 3
    assert dense.tolist() == [2, 0, 2, 1]
