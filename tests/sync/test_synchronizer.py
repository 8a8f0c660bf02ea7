"""publish(): all weights arrive, or an error says which did not."""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_vcpo.config import SyncConfig
from megatron_vcpo.data.digests import digest
from megatron_vcpo.engines.protocol import EngineError
from megatron_vcpo.models.naming import ModelShape, family_by_name
from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.receiver import UpdateReport
from megatron_vcpo.sync.synchronizer import WeightSynchronizer, is_finite
from tests.oracle.model_pairs import VOCAB, gpt_models, transformer_config


class RecordingEngine:
    """Keeps copies of what it is given; may fail or get stuck at one tensor, stop reading early, or misread one."""

    float32_weights: frozenset[str] = frozenset()

    def __init__(
        self,
        *,
        fail_at: str | None = None,
        read_only: int | None = None,
        stuck_at: str | None = None,
        misread: str | None = None,
    ) -> None:
        self.version: int | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.fail_at, self.read_only, self.stuck_at, self.misread = fail_at, read_only, stuck_at, misread

    def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], version: int, *, verify: bool = False
    ) -> UpdateReport:
        self.version = None
        for name, tensor in itertools.islice(weights, self.read_only):
            if name == self.fail_at:
                raise EngineError("no room")
            if name == self.stuck_at:
                time.sleep(60)
            self.weights[name] = tensor.clone() + (name == self.misread)
        self.version = version
        received = {name: digest(tensor) for name, tensor in self.weights.items()} if verify else None
        return UpdateReport(copied=len(self.weights), received=received)


def build(
    engine: RecordingEngine, groups: Any, *, dtype: torch.dtype = torch.float32, timeout: float = 60.0
) -> tuple[Any, Any]:
    config = transformer_config("llama")
    chunks = gpt_models(config, tied=False)
    shape = ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=128, tied_embeddings=False)
    family = family_by_name("llama")
    synchronizer = WeightSynchronizer(chunks, family, shape, groups, engine, SyncConfig(timeout=timeout), dtype=dtype)  # type: ignore[arg-type]
    return chunks[0], synchronizer


def test_the_report_counts_what_the_engine_received(megatron_groups: Any) -> None:
    engine = RecordingEngine()
    _, synchronizer = build(engine, megatron_groups)
    report = synchronizer.publish(5)
    assert list(engine.weights) == synchronizer.gatherer.names
    assert report.tensors == len(engine.weights)
    assert report.bytes == sum(t.nbytes for t in engine.weights.values()) == synchronizer.gatherer.nbytes
    assert report.version == engine.version == 5
    assert report.seconds > 0


def test_many_publications_of_the_same_weights_change_nothing(megatron_groups: Any) -> None:
    engine = RecordingEngine()
    _, synchronizer = build(engine, megatron_groups)
    synchronizer.publish(0)
    first = dict(engine.weights)
    for version in range(1, 50):
        synchronizer.publish(version)
    assert all(torch.equal(engine.weights[n], first[n]) for n in first)


def test_an_engine_that_fails_is_reported_with_the_tensor_it_failed_at(megatron_groups: Any) -> None:
    engine = RecordingEngine(fail_at="model.norm.weight")
    _, synchronizer = build(engine, megatron_groups)
    with pytest.raises(SyncError, match=r"given model\.norm\.weight: EngineError: no room") as caught:
        synchronizer.publish(1)
    assert isinstance(caught.value.__cause__, EngineError)
    assert engine.version is None


@pytest.mark.parametrize("read", [0, 3, 20])
def test_an_engine_that_stops_reading_is_an_error_that_lists_the_rest(read: int, megatron_groups: Any) -> None:
    engine = RecordingEngine(read_only=read)
    _, synchronizer = build(engine, megatron_groups)
    with pytest.raises(SyncError, match=r"left weights unread: .*lm_head\.weight"):
        synchronizer.publish(1)
    assert engine.version is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, megatron_groups: Any) -> None:
    engine = RecordingEngine()
    model, synchronizer = build(engine, megatron_groups)
    with torch.no_grad():
        model.decoder.layers[1].mlp.linear_fc1.weight[-1, 3] = value
    with pytest.raises(SyncError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds"):
        synchronizer.publish(1)
    assert engine.version is None
    assert "model.layers.1.mlp.up_proj.weight" not in engine.weights
    assert "model.layers.1.mlp.gate_proj.weight" in engine.weights


def test_values_beyond_half_precision_are_refused_by_name(megatron_groups: Any) -> None:
    model, synchronizer = build(RecordingEngine(), megatron_groups, dtype=torch.float16)
    synchronizer.publish(1)
    with torch.no_grad():
        model.decoder.layers[0].self_attention.linear_proj.weight[0, :2] = 7e4
    with pytest.raises(SyncError, match=r"layers\.0\.self_attn\.o_proj\.weight: 2 values are outside .*float16"):
        synchronizer.publish(2)


def test_a_stuck_engine_ends_at_the_deadline_with_the_tensor_and_the_rank(megatron_groups: Any) -> None:
    engine = RecordingEngine(stuck_at="model.layers.1.mlp.up_proj.weight")
    _, synchronizer = build(engine, megatron_groups, timeout=0.3)
    started = time.monotonic()
    with pytest.raises(SyncError, match=r"of rank 0 .* version 4 .*sync-timeout\) for .*layers\.1\.mlp\.up_proj"):
        synchronizer.publish(4)
    assert time.monotonic() - started < 50
    assert engine.version is None
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_a_slow_engine_that_goes_on_is_not_at_the_deadline(megatron_groups: Any, monkeypatch: Any) -> None:
    engine = RecordingEngine()
    _, synchronizer = build(engine, megatron_groups, timeout=1.0)
    take = engine.weights.__class__.__setitem__
    engine.weights = type("Slow", (dict,), {"__setitem__": lambda s, n, t: (time.sleep(0.12), take(s, n, t))})()
    started = time.monotonic()
    assert synchronizer.publish(1).tensors == len(synchronizer.gatherer.names)
    assert time.monotonic() - started > 2.0


def test_a_trainer_that_cannot_gather_says_which_tensor_was_next(megatron_groups: Any, monkeypatch: Any) -> None:
    engine = RecordingEngine()
    _, synchronizer = build(engine, megatron_groups)
    whole = synchronizer.gatherer.stream

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(whole(), 3)
        raise RuntimeError("connection reset")

    monkeypatch.setattr(synchronizer.gatherer, "stream", broken)
    fourth = re.escape(synchronizer.gatherer.names[3])
    with pytest.raises(SyncError, match=f"could not bring {fourth} together: RuntimeError: connection reset"):
        synchronizer.publish(1)
    assert engine.version is None


def test_a_verified_publication_compares_what_arrived_with_what_was_sent(megatron_groups: Any) -> None:
    engine = RecordingEngine()
    _, synchronizer = build(engine, megatron_groups)
    report = synchronizer.publish(1, verify=True)
    assert report.verified
    assert report.copied == report.tensors
    engine.misread = "model.layers.0.mlp.down_proj.weight"
    synchronizer.publish(2)  # nobody looks
    with pytest.raises(SyncError, match=r"1 tensors .* other bits .*: model\.layers\.0\.mlp\.down_proj\.weight"):
        synchronizer.publish(3, verify=True)
    assert engine.version is None


def test_what_the_engine_holds_in_float32_is_published_in_float32(megatron_groups: Any) -> None:
    engine = RecordingEngine()
    engine.float32_weights = frozenset({"model.norm.weight", "an_engines_own.weight"})
    model, synchronizer = build(engine, megatron_groups, dtype=torch.bfloat16)
    with torch.no_grad():
        model.decoder.final_layernorm.weight.add_(1e-4)  # less than bfloat16 can tell from 1
    report = synchronizer.publish(1)
    kept = [name for name, tensor in engine.weights.items() if tensor.dtype == torch.float32]
    assert kept == ["model.norm.weight"]
    assert torch.equal(engine.weights["model.norm.weight"], model.decoder.final_layernorm.weight)
    assert report.bytes == synchronizer.gatherer.nbytes
    assert {(n, d) for n, d, _ in synchronizer.gatherer.entries} == {(n, t.dtype) for n, t in engine.weights.items()}


def test_large_finite_values_are_accepted() -> None:
    huge = torch.full((1000,), torch.finfo(torch.float32).max)
    assert is_finite(huge)
    assert is_finite(torch.full((1000,), 65504.0, dtype=torch.float16))
    assert is_finite(torch.empty(0))
    huge[500] = float("inf")
    assert not is_finite(huge)
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))
