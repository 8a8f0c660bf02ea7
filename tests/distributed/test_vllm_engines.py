"""vLLM beside a distributed trainer: an engine for each rank, and one engine over two tensor-parallel ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle import tiny_models

_ROOT = Path(__file__).parents[2]


@pytest.mark.distributed
@pytest.mark.engine
def test_engines_of_every_size_give_the_logprobs_of_transformers(tmp_path: Path) -> None:
    for seed in (0, 1):
        tiny_models.save("llama-tied", seed, tmp_path / str(seed))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, "tests/distributed/vllm_worker.py", str(tmp_path)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "engines agree" in run.stdout, run.stdout[-2000:] + run.stderr[-6000:]
