"""Rollouts over three processes give every rank what one process would have made; one launch for all checks."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_vcpo.rollout.collector import EnginePlace
from tests.distributed.rollout_worker import phase
from tests.oracle.fake_engine import FakeEngine

_ROOT = Path(__file__).parents[2]


@pytest.mark.distributed
def test_every_rank_ends_with_what_one_process_would_have_made(tmp_path: Path) -> None:
    alone = phase(FakeEngine(version=2), EnginePlace())
    assert all(alone[2].values())  # every kind of failure occurs
    (tmp_path / "alone.pickle").write_bytes(pickle.dumps(alone))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    run = subprocess.run(
        [*command, "tests/distributed/rollout_worker.py", str(tmp_path)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "rollouts agree" in run.stdout, run.stdout[-2000:] + run.stderr[-6000:]
