"""Weights copied to where vLLM's own loader put them: the same model as through the loader, and no gap unseen.

A mixture of experts has all kinds of layers: kept as they are, packed, and left to vLLM's loader. The tests share one
engine and run in this order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_vcpo.data.digests import digest
from megatron_vcpo.engines.protocol import EngineError
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from megatron_vcpo.engines.vllm.recorder import Region, Write
from tests.oracle import tiny_models

pytestmark = pytest.mark.engine

IDS = [20, 14, 21, 32, *range(40, 90)]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("moe")
    for seed in (0, 1):
        tiny_models.save("moe", seed, folder / str(seed))
    return [load_file(folder / str(seed) / "model.safetensors") | {"": folder} for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(tensors) -> list[Any]:
    return [tiny_models.load(tensors[0][""] / str(seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(tensors, models) -> Iterator[VLLMEngine]:
    folder = tensors[0].pop("")
    tensors[1].pop("")
    engine = VLLMEngine(
        VLLMSettings(model_dir=str(folder / "0"), dtype="float32", max_model_len=128, kv_cache_bytes=64 << 20)
    )
    yield engine
    engine.shutdown()


def stream(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Through one piece of memory that is overwritten as soon as the next tensor is asked for."""
    memory = torch.empty(max(tensor.numel() for tensor in tensors.values()))
    for name, tensor in tensors.items():
        view = memory[: tensor.numel()].view(tensor.shape).copy_(tensor)
        yield name, view
        memory.fill_(123.0)


def difference(engine: VLLMEngine, model: Any) -> float:
    return float(np.abs(engine.score([IDS], [4])[0] - tiny_models.logprobs(model, IDS, 4)).max())


def test_from_the_second_set_on_all_but_the_experts_are_copied(engine, tensors, models) -> None:
    experts = {name for name in tensors[0] if ".experts." in name}
    first = engine.update_weights(stream(tensors[0]), 0)
    assert (first.copied, first.reloaded) == (0, len(tensors[0]))
    assert difference(engine, models[0]) < 1e-4
    for version in range(1, 6):
        report = engine.update_weights(stream(tensors[version % 2]), version)
        assert (report.copied, report.reloaded) == (len(tensors[0]) - len(experts), len(experts))
        assert set(report.unreadable) == experts
        assert difference(engine, models[version % 2]) < 1e-4


def test_a_verified_update_returns_the_digest_of_every_tensor(engine, tensors, models) -> None:
    report = engine.update_weights(stream(tensors[0]), 6, verify=True)
    assert report.received == {name: digest(tensor) for name, tensor in tensors[0].items()}
    assert difference(engine, models[0]) < 1e-4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.k_proj.weight", "self_attn.qkv_proj"),  # part of a packed weight
        ("model.norm.weight", "model.norm"),  # kept as it is
        ("model.layers.0.mlp.experts.1.up_proj.weight", "mlp.experts"),  # through the loader
    ],
)
def test_a_tensor_that_does_not_come_is_named(name: str, expected: str, engine, tensors) -> None:
    rest = {n: t for n, t in tensors[1].items() if n != name}
    with pytest.raises(EngineError, match=expected):
        engine.update_weights(stream(rest), 7)
    assert engine.version is None


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.embed_tokens.weight", "embed_tokens"), ("model.layers.1.self_attn.v_proj.weight", "qkv_proj")],
)
def test_a_copy_that_leaves_elements_out_is_seen_by_a_verified_update(
    name: str, layer: str, engine, tensors, models, monkeypatch
) -> None:
    plan = engine._loader._plan
    (route,) = plan.routes[name]
    one_element = Region(0, (1,), (1,))
    short = (*route[:2], Write(name, one_element, one_element, 0))
    copy_all = plan.write

    def copy_less(given: str, tensor: torch.Tensor) -> Any:
        plan.routes[name] = [short]
        try:
            return copy_all(given, tensor)
        finally:
            plan.routes[name] = [route]

    monkeypatch.setattr(plan, "write", copy_less)
    with pytest.raises(EngineError, match=f"(not written, or not in full|do not hold what was sent): .*{layer}"):
        engine.update_weights(stream(tensors[1]), 8, verify=True)
    assert engine.version is None
    monkeypatch.undo()
    engine.update_weights(stream(tensors[1]), 9, verify=True)
    assert difference(engine, models[1]) < 1e-4


def test_a_packed_copy_that_is_not_made_anew_is_seen_by_a_verified_update(engine, tensors, models, monkeypatch) -> None:
    plan = engine._loader._plan
    skipped = next(layer for layer in plan.layers if layer.name.endswith("o_proj"))
    pack = plan.pack
    calls = []

    def pack_once(layer: Any) -> None:
        calls.extend([layer] if layer is skipped else [])
        if layer is not skipped or len(calls) == 1:  # the first is the spoiling
            pack(layer)

    monkeypatch.setattr(plan, "pack", pack_once)
    with pytest.raises(EngineError, match=r"do not hold what was sent: .*o_proj\.weight"):
        engine.update_weights(stream(tensors[0]), 10, verify=True)
    monkeypatch.undo()
    engine.update_weights(stream(tensors[0]), 11)
    assert difference(engine, models[0]) < 1e-4


def test_an_engine_whose_parameter_moved_is_loaded_and_recorded_anew(engine, tensors, models) -> None:
    module = engine._loader._plan.layers[0].module
    module.weight = torch.nn.Parameter(module.weight.data.clone(), requires_grad=False)
    assert engine.update_weights(stream(tensors[0]), 12).copied == 0
    assert difference(engine, models[0]) < 1e-4
    assert engine.update_weights(stream(tensors[1]), 13).copied > 0
    assert difference(engine, models[1]) < 1e-4
