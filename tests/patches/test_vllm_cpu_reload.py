"""The two silent faults of vLLM's CPU weight reload: each patch works, and is still needed.

A test of the second kind that fails means that vLLM has been repaired: remove the patch and its tests.
"""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from megatron_vcpo.patches import vllm_cpu_moe_reload, vllm_cpu_tied_head
from tests.oracle import tiny_models

pytestmark = pytest.mark.engine

SEQUENCE = [5 + 7 * i % 90 for i in range(60)]


@pytest.fixture(scope="module")
def setup(request, tmp_path_factory):
    """An engine for the kind of model a test names, and the folder of two sets of weights for it."""
    folder = tmp_path_factory.mktemp(request.param)
    for seed in (0, 1):
        tiny_models.save(request.param, seed, folder / str(seed))
    engine = VLLMEngine(
        VLLMSettings(model_dir=str(folder / "0"), dtype="float32", max_model_len=128, kv_cache_bytes=64 << 20)
    )
    yield engine, folder
    engine.shutdown()


def difference_after_update(engine: VLLMEngine, folder, which: int) -> float:
    engine.update_weights(iter(load_file(folder / str(which) / "model.safetensors").items()), which)
    expected = tiny_models.logprobs(tiny_models.load(folder / str(which)), SEQUENCE, 1)
    return float(np.abs(engine.score([SEQUENCE], [1])[0] - expected).max())


@pytest.mark.parametrize("setup", ["moe", "llama-tied"], indirect=True)
def test_patched_engine_takes_each_of_three_updates(setup):
    engine, folder = setup
    assert [difference_after_update(engine, folder, which) < 1e-4 for which in (0, 1, 0)] == [True] * 3


@pytest.mark.parametrize("setup", ["moe"], indirect=True)
def test_experts_are_still_stale_without_the_patch(setup, monkeypatch):
    engine, folder = setup
    assert difference_after_update(engine, folder, 0) < 1e-4
    monkeypatch.setattr(vllm_cpu_moe_reload, "forget_packed_experts", lambda model: 0)
    assert difference_after_update(engine, folder, 1) > 0.1


@pytest.mark.parametrize("setup", ["llama-tied"], indirect=True)
def test_tied_head_is_still_stale_without_the_patch(setup, monkeypatch):
    engine, folder = setup
    assert difference_after_update(engine, folder, 0) < 1e-4
    monkeypatch.setattr(vllm_cpu_tied_head, "repack_tied_heads", lambda model: 0)
    assert difference_after_update(engine, folder, 1) > 0.1
