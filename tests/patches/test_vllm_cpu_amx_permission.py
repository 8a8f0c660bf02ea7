"""vLLM's bfloat16 attention on a processor with AMX: it dies without the patch, and answers with it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.oracle import tiny_models
from tests.oracle.forked import forked_python

_ROOT = Path(__file__).parents[2]
_ENGINE = """
import sys
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from megatron_vcpo.patches import vllm_cpu_amx_permission

if sys.argv[2] == "unpatched":
    vllm_cpu_amx_permission.apply = lambda: None
engine = VLLMEngine(
    VLLMSettings(model_dir=sys.argv[1], dtype="bfloat16", max_model_len=64, kv_cache_bytes=64 << 20)
)
engine.version = 0
engine.score([[1, 2, 3, 4]], [1])
engine.shutdown()
print("scored")
"""


def run(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    tiny_models.save("moe", 0, folder)
    return subprocess.run(
        [*forked_python(vllm=True), "-c", _ENGINE, str(folder), how],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.engine
def test_the_engine_scores_in_bfloat16(tmp_path: Path) -> None:
    finished = run(tmp_path, "patched")
    assert "scored" in finished.stdout, finished.stderr[-3000:]


@pytest.mark.engine
def test_attention_still_takes_the_tiles_unasked(tmp_path: Path) -> None:
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    assert run(tmp_path, "unpatched").returncode == -signal.SIGILL
