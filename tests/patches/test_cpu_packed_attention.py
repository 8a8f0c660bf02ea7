"""The packed core attention against one dense attention per sequence."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vcpo.patches import megatron_cpu
from megatron_vcpo.patches.cpu_packed_attention import PackedCoreAttention, padded_batches
from tests.oracle.single_process import single_process_megatron

megatron_cpu.install()
PLAIN = {"window_size": None, "softmax_type": "vanilla"}


def config(**changes):
    fields = {"context_parallel_size": 1, "attention_dropout": 0.0, "window_attn_skip_freq": 2, **PLAIN}
    sizes = {"num_attention_heads": 4, "tensor_model_parallel_size": 1, "params_dtype": torch.float64}
    return types.SimpleNamespace(**fields | sizes | changes)


def dense(query, key, value, window=None, sinks=None):
    """[t, h, d]: plain softmax attention in the tensors' dtype."""
    key = key.repeat_interleave(query.size(1) // key.size(1), 1)
    value = value.repeat_interleave(query.size(1) // value.size(1), 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.size(2) ** 0.5
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
    scores = scores.masked_fill((distance < 0) | (distance > (len(key) if window is None else window)), -torch.inf)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, value).flatten(1)


@settings(max_examples=40)
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
    out = PackedCoreAttention(config(), 1)(query, key, value, packed_seq_params=packed)
    ours = torch.autograd.grad((out * weight).sum(), (query, key, value))
    reference = torch.cat([dense(*(x[0] for x in chunk)) for chunk in _split((query, key, value), lengths)])
    torch.testing.assert_close(out, reference)
    for mine, theirs in zip(ours, torch.autograd.grad((reference * weight).sum(), (query, key, value))):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_a_sequence_that_is_not_finite_leaves_the_others_alone(spoilt):
    torch.manual_seed(0)
    lengths = [9, 8, 7]
    packed = types.SimpleNamespace(cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    own = torch.arange(3).repeat_interleave(torch.tensor(lengths)) == spoilt
    clean = [torch.randn(24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    weight = torch.randn(24, 32, dtype=torch.float64)[~own]
    results = []
    for fill in (0.0, torch.nan):
        inputs = [x.masked_fill(own[:, None, None], fill).requires_grad_() for x in clean]
        out = PackedCoreAttention(config(), 1)(*inputs, packed_seq_params=packed)[~own]
        gradients = torch.autograd.grad((out * weight).sum(), inputs)
        results.append([out, *(g[~own] for g in gradients)])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [None, 0, 3])
def test_windows_and_sinks_equal_one_dense_attention_per_sequence_forward_and_backward(window):
    torch.manual_seed(0)
    lengths = [3, 9, 1, 40, 8, 8]
    query, key, value = (torch.randn(69, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    packed = types.SimpleNamespace(cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    size = None if window is None else (window, 0)
    attention = PackedCoreAttention(config(softmax_type="learnable", window_size=size), 1)
    sinks = attention.softmax_offset
    torch.nn.init.normal_(sinks)
    out = attention(query, key, value, packed_seq_params=packed)
    reference = torch.cat([dense(*(x[0] for x in c), window, sinks) for c in _split((query, key, value), lengths)])
    torch.testing.assert_close(out, reference)
    weight, inputs = torch.randn(69, 32, dtype=torch.float64), (query, key, value, sinks)
    for mine, theirs in zip(*(torch.autograd.grad((x * weight).sum(), inputs) for x in (out, reference))):
        torch.testing.assert_close(mine, theirs)
    alone = attention(*(x[:12, None] for x in (query, key, value)))  # plain: [s, b, h, d]
    torch.testing.assert_close(alone[:, 0], dense(query[:12], key[:12], value[:12], window, sinks))


def test_every_other_layer_has_a_window():
    layers = [PackedCoreAttention(config(window_size=(7, 0)), number) for number in (1, 2, 3, 4)]
    assert [layer.window for layer in layers] == [7, None, 7, None]


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
