"""The stream of a single process: order, type, and how much it holds at one time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_vcpo.models.naming import ModelShape, family_by_name
from megatron_vcpo.sync.gather import WeightGatherer
from tests.oracle.model_pairs import VOCAB, gpt_models, transformer_config
from tests.oracle.staging_meter import StagingMeter


def gatherer_of(name: str, megatron_groups: Any, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config = transformer_config(name, **changes)
    chunks = gpt_models(config, tied=False)
    shape = ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=128, tied_embeddings=False)
    return chunks[0], WeightGatherer(chunks, family_by_name(name), shape, megatron_groups, dtype=dtype)


def test_one_process_hands_out_its_own_memory_where_nothing_is_reordered(megatron_groups: Any) -> None:
    model, gatherer = gatherer_of("llama", megatron_groups)
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    copied = {n for n, t in gatherer.stream() if t.untyped_storage().data_ptr() not in owned}
    assert copied == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in "qkv"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_come_out_in_the_engines_type_and_without_a_graph(dtype: torch.dtype, megatron_groups: Any) -> None:
    model, gatherer = gatherer_of("qwen2", megatron_groups, dtype=dtype)
    for _, tensor in gatherer.stream():
        assert tensor.dtype is dtype
        assert not tensor.requires_grad
    assert gatherer.nbytes == sum(t.nbytes for _, t in gatherer.stream())
    assert all(p.requires_grad and p.dtype is torch.float32 for p in model.parameters())


def test_the_first_tensor_comes_out_after_one_parameter_was_touched(megatron_groups: Any) -> None:
    _, gatherer = gatherer_of("llama", megatron_groups)
    touched: list[str] = []

    class Recording(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            touched.append(key)
            return super().__getitem__(key)

    gatherer._local = Recording(gatherer._local)
    assert next(gatherer.stream())[0] == "model.embed_tokens.weight"
    assert touched == ["embedding.word_embeddings.weight"]


def test_a_stream_never_holds_more_than_its_largest_parameters(megatron_groups: Any) -> None:
    model, gatherer = gatherer_of("llama", megatron_groups, dtype=torch.bfloat16, num_layers=8)
    largest = max(p.numel() for p in model.parameters()) * 2
    with StagingMeter(model.parameters()) as meter:
        for name, tensor in gatherer.stream():
            del name, tensor
    assert 0 < meter.peak <= 2 * largest
    assert meter.peak < gatherer.nbytes / 4
    assert not meter.alive


def test_two_streams_are_equal_and_follow_the_weights(megatron_groups: Any) -> None:
    model, gatherer = gatherer_of("qwen3_moe", megatron_groups)
    first = {n: t.clone() for n, t in gatherer.stream()}
    assert all(torch.equal(t, first[n]) for n, t in gatherer.stream())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(torch.equal(t, first[n] + 1) for n, t in gatherer.stream())
