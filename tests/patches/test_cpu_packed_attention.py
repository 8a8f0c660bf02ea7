"""The packed core attention against one dense attention per sequence."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patches.cpu_packed_attention import PackedCoreAttention, padded_batches
from tests.oracle.single_process import single_process_megatron

CONFIG = types.SimpleNamespace(context_parallel_size=1, attention_dropout=0.0)


def dense(query, key, value):
    """[t, h, d]: plain softmax attention in the tensors' dtype."""
    key = key.repeat_interleave(query.size(1) // key.size(1), 1)
    value = value.repeat_interleave(query.size(1) // value.size(1), 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.size(2) ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_every_token_row_is_in_exactly_one_padded_batch(lengths):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    batches = padded_batches(cu_seqlens)
    rows = torch.cat([b[b >= 0] for b in batches]) if batches else torch.zeros(0)
    assert sorted(rows.tolist()) == list(range(sum(lengths)))
    padded = sum(b.numel() for b in batches)
    assert padded <= 1.5 * sum(lengths) + 1


@pytest.mark.parametrize("lengths", [[5], [3, 9, 1, 40, 8, 8], [1, 1, 1]])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_packed_attention_equals_one_dense_attention_per_sequence_forward_and_backward(lengths, groups):
    torch.manual_seed(0)
    total = sum(lengths)
    query = torch.randn(total, 4, 8, dtype=torch.float64, requires_grad=True)
    key = torch.randn(total, groups, 8, dtype=torch.float64, requires_grad=True)
    value = torch.randn(total, groups, 8, dtype=torch.float64, requires_grad=True)
    packed = types.SimpleNamespace(cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    weight = torch.randn(total, 32, dtype=torch.float64)
    out = PackedCoreAttention(CONFIG, 1)(query, key, value, packed_seq_params=packed)
    ours = torch.autograd.grad((out * weight).sum(), (query, key, value))
    reference = torch.cat([dense(*(x[0] for x in chunk)) for chunk in _split((query, key, value), lengths)])
    torch.testing.assert_close(out, reference)
    for mine, theirs in zip(ours, torch.autograd.grad((reference * weight).sum(), (query, key, value))):
        torch.testing.assert_close(mine, theirs)


def _split(tensors, lengths):
    return zip(*[[(part,) for part in tensor.split(lengths)] for tensor in tensors])


def test_stock_attention_still_refuses_packing():
    """When this fails, patches/cpu_packed_attention.py may no longer be needed: see whether the stock one is right."""
    with single_process_megatron():
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True)
        stock = DotProductAttention(config, 1, AttnMaskType.causal, "self")
        x = torch.randn(4, 4, 8)
        cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        with pytest.raises(AssertionError, match=r"[Pp]acked"):
            stock(x, x, x, None, packed_seq_params=packed)
