"""The packing plan as a pure function, and the tensors built from it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.packing import PackingError, RowAlignment, build_micro_batch, plan_micro_batches

CPU = torch.device("cpu")


def make_trajectory(prompt, response, *, group=0, index=0, mask=None):
    length = len(response)
    return Trajectory(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        behavior_logprobs=-np.arange(1, length + 1, dtype=np.float32),
        versions=np.zeros(length, np.int32),
        response_mask=np.ones(length, bool) if mask is None else np.array(mask, bool),
        reward=1.0,
        group_id=group,
        index=index,
    )


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=0, max_size=60),
    dp_size=st.integers(1, 5),
    multiple=st.integers(1, 3),
    group_size=st.integers(1, 6),
    prefer=st.booleans(),
)
def test_every_trajectory_is_packed_once_within_budget_on_equally_many_micro_batches(
    lengths, dp_size, multiple, group_size, prefer
):
    groups = [i // group_size for i in range(len(lengths))]
    plan = plan_micro_batches(lengths, groups, budget=100, dp_size=dp_size, multiple=multiple, prefer_groups=prefer)
    packed = sorted(i for rank in plan.bins for bin_ in rank for i in bin_)
    assert packed == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= 100 for rank in plan.bins for bin_ in rank)
    assert len({len(rank) for rank in plan.bins}) == 1
    assert plan.num_micro_batches % multiple == 0
    if plan.groups_together:
        home = {}
        for r, rank in enumerate(plan.bins):
            for b, bin_ in enumerate(rank):
                for i in bin_:
                    assert home.setdefault(groups[i], (r, b)) == (r, b)


def test_groups_are_split_only_when_one_does_not_fit():
    fits = plan_micro_batches([30, 30, 30, 30], [0, 0, 1, 1], budget=60, dp_size=1)
    assert fits.groups_together
    split = plan_micro_batches([30, 31, 30, 30], [0, 0, 1, 1], budget=60, dp_size=1)
    assert not split.groups_together


def test_a_trajectory_over_the_budget_is_refused_by_name():
    with pytest.raises(PackingError, match=r"trajectory 1 has 61 tokens.*--vcpo-tokens-per-micro-batch"):
        plan_micro_batches([10, 61], [0, 0], budget=60, dp_size=1)


def test_packing_wastes_little_and_balances_ranks_on_realistic_lengths():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 0.8, 512), 20, 2048).astype(int).tolist()
    plan = plan_micro_batches(lengths, list(range(512)), budget=4096, dp_size=4)
    loads = [sum(lengths[i] for bin_ in rank for i in bin_) for rank in plan.bins]
    assert max(loads) / (sum(loads) / len(loads)) < 1.02
    full = 4096 * 4 * plan.num_micro_batches
    assert sum(lengths) / full > 0.90


def test_labels_masks_and_logprobs_line_up_by_hand():
    first = make_trajectory([10, 11], [12, 13, 14], mask=[True, False, True])
    second = make_trajectory([20], [21])
    micro = build_micro_batch([first, second], (0, 1), alignment=RowAlignment(token_multiple=4), device=CPU)
    assert micro.tokens.tolist() == [[10, 11, 12, 13, 14, 20, 21, 0]]
    assert micro.labels.tolist() == [[11, 12, 13, 14, 0, 21, 0, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0]]
    assert micro.cu_seqlens.tolist() == [0, 5, 7, 8]
    assert micro.trajectory_ends.tolist() == [0, 5, 7]
    assert micro.response_mask.tolist() == [False, True, False, True, False, True, False, False]
    assert micro.behavior_logprobs.tolist() == [0.0, -1.0, -2.0, -3.0, 0.0, -1.0, 0.0, 0.0]


def test_an_empty_response_is_packed_with_nothing_to_learn():
    micro = build_micro_batch([make_trajectory([1, 2], [])], (0,), alignment=RowAlignment(), device=CPU)
    assert micro.tokens.tolist() == [[1, 2]]
    assert not micro.response_mask.any()


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_a_filler_holds_no_trajectory_and_divides_evenly(multiple):
    filler = build_micro_batch([], (), alignment=RowAlignment(token_multiple=multiple), device=CPU)
    assert filler.num_trajectories == 0
    assert filler.tokens.size(1) % multiple == 0
    assert filler.tokens.size(1) >= 1
    assert filler.trajectory_ends.tolist() == [0]


def test_context_parallel_ranks_hold_the_front_and_the_end_of_every_sequence_by_hand():
    first = make_trajectory([10, 11, 12], [13, 14, 15])  # 6 tokens take 8 rows
    second = make_trajectory([20], [21, 22, 23])
    shards = [
        build_micro_batch([first, second], (0, 1), alignment=RowAlignment(cp_rank=r, cp_size=2), device=CPU)
        for r in range(2)
    ]
    assert shards[0].tokens.tolist() == [[10, 11, 0, 0, 20, 23]]
    assert shards[1].tokens.tolist() == [[12, 13, 14, 15, 21, 22]]
    assert shards[0].labels.tolist() == [[11, 12, 0, 0, 21, 0]]
    assert shards[1].position_ids.tolist() == [[2, 3, 4, 5, 1, 2]]
    for shard in shards:
        assert shard.context_rows.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
        assert shard.cu_seqlens.tolist() == [0, 8, 12]
        assert shard.starts == (0, 8)
        assert shard.max_seqlen == 8
        assert shard.response_mask.nonzero().flatten().tolist() == [2, 3, 4, 8, 9, 10]


@given(
    lengths=st.lists(st.integers(1, 30), max_size=8),
    cp_size=st.integers(1, 4),
    token_multiple=st.sampled_from([1, 2, 3, 4]),
)
@settings(max_examples=60)
def test_the_rows_of_a_micro_batch_divide_over_context_and_sequence_parallel_ranks(lengths, cp_size, token_multiple):
    trajectories = [make_trajectory([1], [2] * (length - 1)) for length in lengths]
    indices = tuple(range(len(lengths)))
    seen = []
    for rank in range(cp_size):
        alignment = RowAlignment(cp_rank=rank, cp_size=cp_size, token_multiple=token_multiple)
        micro = build_micro_batch(trajectories, indices, alignment=alignment, device=CPU)
        assert micro.tokens.size(1) * cp_size == micro.num_rows == alignment.rows(lengths)
        assert micro.tokens.size(1) % token_multiple == 0
        assert micro.cu_seqlens[-1] == micro.num_rows
        assert micro.num_rows - sum(lengths) <= 2 * cp_size * (len(lengths) + token_multiple * cp_size)
        seen += list(range(micro.num_rows)) if cp_size == 1 else micro.context_rows[rank].tolist()
    assert sorted(seen) == list(range(micro.num_rows))


def test_rows_can_be_padded_to_what_other_micro_batches_need():
    micro = build_micro_batch([make_trajectory([1], [2])], (0,), alignment=RowAlignment(), rows=5, device=CPU)
    assert micro.tokens.tolist() == [[1, 2, 0, 0, 0]]
    assert micro.cu_seqlens.tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    "alignment",
    [
        RowAlignment(),
        RowAlignment(token_multiple=8),
        RowAlignment(cp_size=2),
        RowAlignment(cp_size=8, token_multiple=8),
    ],
    ids=["plain", "sequence parallel", "context parallel", "both"],
)
def test_padding_is_under_five_percent_of_the_rows_on_realistic_lengths(alignment):
    lengths = np.clip(np.random.default_rng(1).lognormal(6.0, 0.8, 512), 40, 4096).astype(int).tolist()
    spans = [alignment.sequence_rows(length) for length in lengths]
    plan = plan_micro_batches(spans, list(range(512)), budget=8192, dp_size=4)
    rows = [sum(alignment.rows([lengths[i] for i in bin_]) for bin_ in rank) for rank in plan.bins]
    assert all(alignment.rows([lengths[i] for i in bin_]) <= 8192 for rank in plan.bins for bin_ in rank)
    assert sum(lengths) / sum(rows) > 0.95
    assert sum(rows) / (len(rows) * max(rows)) > 0.98  # no data-parallel rank waits for another
