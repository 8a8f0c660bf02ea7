"""What the flow hands to its engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vcpo.config import PluginConfig
from megatron_vcpo.engines.vllm.engine import VLLMSettings
from megatron_vcpo.flow import colocated as rollout_flow


@pytest.mark.parametrize("placement", ["colocated", "process"])
def test_an_engine_logs_into_the_run_s_folder_under_its_rank(tmp_path, monkeypatch, placement):
    given: list[VLLMSettings] = []

    def engine(settings: VLLMSettings, **options: Any) -> None:
        given.append(settings)

    monkeypatch.setattr(rollout_flow, "VLLMEngine", engine)
    monkeypatch.setattr(rollout_flow, "ProcessEngine", engine)
    monkeypatch.setattr(rollout_flow.megatron_cpu, "active", lambda: False)
    config = PluginConfig()
    config.vcpo.load_hf = "model"
    config.rollout.engine_placement = placement
    flow = SimpleNamespace(
        config=config, args=SimpleNamespace(rank=3), run_dir=tmp_path, _dtype_name="float32", vocab_size=9
    )
    rollout_flow.RolloutFlow._build_engine(flow, [])
    assert [settings.log_file for settings in given] == [str(tmp_path / "engine_rank3.log")]
