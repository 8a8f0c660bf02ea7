"""Token statistics against plain autograd in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vcpo.mcore import logprobs as module
from megatron_vcpo.mcore.logprobs import OutputContext, VocabShard, output_processor, token_statistics


def _reference(logits, targets, vocab, temperature):
    log_pi = torch.log_softmax(logits[:, :vocab] / temperature, 1)
    pi = log_pi.exp()
    onehot = torch.nn.functional.one_hot(targets, vocab).to(pi.dtype)
    logp = log_pi.gather(1, targets[:, None])[:, 0]
    return logp, ((onehot - pi) ** 2).sum(1), -(pi * log_pi).sum(1)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 9),
    vocab=st.integers(2, 13),
    padding=st.integers(0, 5),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    scale=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_statistics_and_gradients_equal_plain_autograd(rows, vocab, padding, temperature, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab + padding, dtype=torch.float64, generator=generator) * scale
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    weights = torch.randn(2, rows, dtype=torch.float64, generator=generator)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    shard = VocabShard.of(vocab + padding, vocab, None)
    stats = token_statistics(ours, targets, shard, temperature=temperature)
    logp, energy, entropy = _reference(plain, targets, vocab, temperature)
    for mine, reference in ((stats.logprobs, logp), (stats.energy, energy), (stats.entropy, entropy)):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)
    (weights[0] * stats.logprobs + weights[1] * stats.entropy).sum().backward()
    (weights[0] * logp + weights[1] * entropy).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-9, atol=1e-9)


def test_blocks_of_rows_change_nothing(monkeypatch):
    logits = torch.randn(17, 11, dtype=torch.float64)
    targets = torch.randint(0, 11, (17,))
    shard = VocabShard.of(11, 11, None)
    results = []
    for elements in (1 << 24, 25):
        monkeypatch.setattr(module, "_BLOCK_ELEMENTS", {"cpu": elements})
        leaf = logits.clone().requires_grad_()
        stats = token_statistics(leaf, targets, shard)
        (stats.logprobs.sum() + stats.entropy.sum()).backward()
        results.append((stats.logprobs.detach(), stats.energy, stats.entropy.detach(), leaf.grad))
    for whole, blocked in zip(*results):
        torch.testing.assert_close(whole, blocked, rtol=0, atol=1e-13)


def test_padding_columns_never_count_however_large():
    logits = torch.randn(4, 8)
    logits[:, 6:] = 100.0
    stats = token_statistics(logits, torch.tensor([0, 1, 2, 5]), VocabShard.of(8, 6, None))
    torch.testing.assert_close(stats.logprobs, torch.log_softmax(logits[:, :6], 1)[range(4), [0, 1, 2, 5]])


def test_statistics_of_half_precision_logits_are_fp32():
    logits = torch.randn(5, 7).to(torch.bfloat16)
    stats = token_statistics(logits, torch.zeros(5, dtype=torch.int64), VocabShard.of(7, 7, None))
    assert stats.logprobs.dtype == torch.float32
    torch.testing.assert_close(stats.logprobs, torch.log_softmax(logits.float(), 1)[:, 0])


@pytest.mark.parametrize("chunk", [0, 1, 3, 100])
def test_chunking_the_output_layer_changes_neither_values_nor_gradients(chunk):
    torch.manual_seed(0)
    weight = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(7, 1, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 9, (1, 7))

    def output_layer(rows, weight=None, runtime_gather_output=None):
        return rows @ weight.T, None

    config = type("Config", (), {"sequence_parallel": False, "tensor_model_parallel_size": 1})
    context = OutputContext(vocab_size=9, temperature=0.9, chunk=chunk, tp_group=None)
    out = output_processor(
        hidden_states=hidden,
        output_layer=output_layer,
        output_weight=weight,
        labels=labels,
        context=context,
        config=config,
    )
    out["logprobs"].sum().backward()
    logp, _, _ = _reference((hidden.detach()[:, 0] @ weight.detach().T), labels[0], 9, 0.9)
    torch.testing.assert_close(out["logprobs"].detach(), logp)
    grads = weight.grad.clone(), hidden.grad.clone()
    weight.grad = hidden.grad = None
    _reference(hidden[:, 0] @ weight.T, labels[0], 9, 0.9)[0].sum().backward()
    torch.testing.assert_close(grads[0], weight.grad)
    torch.testing.assert_close(grads[1], hidden.grad)


def test_the_energy_of_a_sharp_policy_does_not_cancel_away():
    logits = torch.tensor([[20.0, 0.0, 1.0]])
    stats = token_statistics(logits, torch.tensor([0]), VocabShard.of(3, 3, None))
    _, energy, _ = _reference(logits.double(), torch.tensor([0]), 3, 1.0)
    assert 0.0 < float(energy) < 1e-15
    torch.testing.assert_close(stats.energy.double(), energy, rtol=1e-5, atol=0.0)
