"""Buckets: small parameters together, in order, never over the limit, the same on every rank."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from megatron_vcpo.models.naming import ModelShape, ParameterLayout, family_by_name
from megatron_vcpo.sync.buckets import plan_buckets

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    num_query_groups=2,
    head_dim=4,
    ffn_hidden_size=32,
    vocab_size=60,
    padded_vocab_size=64,
    tied_embeddings=False,
    num_experts=4,
    moe_ffn_hidden_size=8,
    moe_layers=(False, True, True, True),
)
SPECS = family_by_name("qwen3_moe").parameters(SHAPE)
STAGES = {spec.name: 0 if (spec.layer or 0) < 2 and "final" not in spec.name else 1 for spec in SPECS}
ITEM = 4


def plan(layout: ParameterLayout, bucket_bytes: int) -> list[Any]:
    return plan_buckets(SPECS, STAGES, SHAPE, layout, itemsize=ITEM, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 4096, 1 << 20])
def test_every_parameter_travels_once_in_order_and_no_bucket_is_over_the_limit(bucket_bytes: int) -> None:
    buckets = plan(ParameterLayout(tp_size=2, pp_size=2, ep_size=2, expert_tp_size=1), bucket_bytes)
    assert [spec for bucket in buckets for spec in bucket.specs] == SPECS
    assert all(len(b.specs) == 1 or b.nbytes(ITEM) <= bucket_bytes for b in buckets)
    elements = sum(math.prod(size) for spec in SPECS for _, size in spec.hf)
    padding = 2 * (SHAPE.padded_vocab_size - SHAPE.vocab_size) * SHAPE.hidden_size  # of both ends
    assert sum(b.nbytes(ITEM) // (b.dtype.itemsize if b.dtype else ITEM) for b in buckets) >= elements + padding
    if bucket_bytes == 1:
        assert len(buckets) == len(SPECS)
    else:
        assert any(len(b.specs) > 1 for b in buckets)


def test_a_bucket_has_one_owner() -> None:
    for bucket in plan(ParameterLayout(tp_size=2, pp_size=2, ep_size=2, expert_tp_size=1), 1 << 20):
        assert {STAGES[spec.name] for spec in bucket.specs} == {bucket.stage}
        owners = {None if spec.expert is None else spec.expert // 2 for spec in bucket.specs}
        assert owners == {bucket.expert_rank}
        assert bucket.tp_size == (2 if bucket.expert_rank is None else 1)


def test_the_plan_does_not_depend_on_the_ranks_place() -> None:
    layout = ParameterLayout(tp_size=2, pp_size=2, ep_size=2, expert_tp_size=2)
    other = dataclasses.replace(layout, tp_rank=1, pp_rank=1, ep_rank=1, expert_tp_rank=1)
    assert plan(layout, 4096) == plan(other, 4096)


def test_sizes_count_all_ranks_shards() -> None:
    whole = sum(b.nbytes(ITEM) for b in plan(ParameterLayout(), 4096))
    padded = 2 * (SHAPE.padded_vocab_size - SHAPE.vocab_size) * SHAPE.hidden_size * ITEM
    numel = sum(a * (b[0] if b else 1) for spec in SPECS for _, (a, *b) in spec.hf)
    assert whole == numel * ITEM + padded
