"""Rollouts over three processes give every rank what one process would have made; one launch for all checks."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from megatron_vcpo.rollout.collector import EnginePlace
from tests.distributed.rollout_worker import phase
from tests.oracle.fake_engine import FakeEngine
from tests.oracle.torchrun import torchrun


@pytest.mark.distributed
def test_every_rank_ends_with_what_one_process_would_have_made(tmp_path: Path) -> None:
    alone = phase(FakeEngine(version=2), EnginePlace())
    assert all(alone[2].values())  # every kind of failure occurs
    (tmp_path / "alone.pickle").write_bytes(pickle.dumps(alone))
    torchrun(Path(__file__).with_name("rollout_worker.py"), str(tmp_path), processes=3, passed="rollouts agree")
