"""What an engine is built from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_vcpo.config import PluginConfig
from megatron_vcpo.engines.vllm.engine import VLLMSettings
from megatron_vcpo.flow import assembly


@pytest.mark.parametrize("placement", ["colocated", "process"])
def test_an_engine_logs_into_the_run_s_folder_under_its_rank(tmp_path, monkeypatch, placement):
    given: list[VLLMSettings] = []

    def engine(settings: VLLMSettings, **options: Any) -> None:
        given.append(settings)

    monkeypatch.setattr(VLLMSettings, "build", engine)
    monkeypatch.setattr(assembly, "ProcessEngine", engine)
    monkeypatch.setattr(assembly.megatron_cpu, "active", lambda: False)
    config = PluginConfig()
    config.vcpo.load_hf = "model"
    config.rollout.engine_placement = placement
    args = SimpleNamespace(rank=3, params_dtype=torch.float32)
    assembly.build_engine(args, config, SimpleNamespace(vocab_size=9), tmp_path, [])
    assert [settings.log_file for settings in given] == [str(tmp_path / "engine_rank3.log")]
