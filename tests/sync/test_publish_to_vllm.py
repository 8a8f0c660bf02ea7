"""The real engine computes what Megatron computes after every publication, and not before it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.oracle.forked import forked_python

_WORKER = Path(__file__).with_name("publish_worker.py")
_ROOT = Path(__file__).parents[2]


@pytest.mark.engine
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_vllm_scores_as_megatron_does_after_each_of_three_publications(name: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [*forked_python(vllm=True), str(_WORKER), name, str(tmp_path)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert "stale weights were noticed" in run.stdout, run.stdout[-2000:] + run.stderr[-4000:]
    assert run.returncode == 0
