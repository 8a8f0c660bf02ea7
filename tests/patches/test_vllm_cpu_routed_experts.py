"""Whether vLLM's own flag has learned to work on a CPU; what the patch does is tested in tests/rollout."""

from __future__ import annotations

import pytest

from megatron_vcpo.engines.protocol import EngineError
from megatron_vcpo.engines.vllm import routes as vllm_routes
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from tests.oracle import tiny_models


@pytest.mark.engine
def test_the_flag_still_fails_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "megatron_vcpo.engines.vllm.engine.engine_flags", lambda on_cpu: {"enable_return_routed_experts": True}
    )
    monkeypatch.setattr("megatron_vcpo.engines.vllm.engine.VLLMRoutes", lambda llm, on_cpu: _by_flag(llm))
    settings = VLLMSettings(
        model_dir=str(tiny_models.save("moe", 0, tmp_path)),
        dtype="float32",
        max_model_len=64,
        kv_cache_bytes=64 << 20,
        return_routes=True,
    )
    with pytest.raises(EngineError, match="Model Runner V2"):
        VLLMEngine(settings)


def _by_flag(llm):
    return vllm_routes.VLLMRoutes(llm, on_cpu=False)
