"""What becomes of the trajectories of a step that was skipped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_vcpo.config import PluginConfig
from megatron_vcpo.flow import BaseFlow, StepBatch
from tests.oracle.single_process import single_process_megatron
from tests.oracle.trajectories import trajectory


class Flow(BaseFlow):
    def __init__(self, folder: Path, retries: int) -> None:
        args = SimpleNamespace(rank=0, save=str(folder), curr_iteration=0, train_iters=9)
        config = PluginConfig()
        config.vcpo.overflow_retries = retries
        super().__init__(args, config, SimpleNamespace(vocab_size=9))
        self.kept: list[StepBatch] = []

    def put_back(self, batch: StepBatch) -> None:
        self.kept.append(batch)


@pytest.fixture(scope="module", autouse=True)
def groups():
    with single_process_megatron() as collection:
        yield collection


@pytest.mark.parametrize(
    ("success", "overflow", "tried", "allowed", "kept"),
    [
        (False, 1.0, 0, 1, True),
        (False, 1.0, 1, 1, False),  # once is the default
        (False, 1.0, 1, 2, True),
        (False, 1.0, 0, 0, False),  # consumed
        (False, 0.0, 0, 1, False),  # NaN, or nothing to train on: no retry would help
        (True, 0.0, 0, 1, False),
    ],
)
def test_only_an_overflow_keeps_its_trajectories_and_only_so_often(tmp_path, success, overflow, tried, allowed, kept):
    flow = Flow(tmp_path, allowed)
    batch = StepBatch(trajectories=[trajectory()], lags=[2], retries=tried)
    flow.after_step({"skipped": float(not success), "overflow": overflow}, batch=batch, success=success, model=[])
    assert flow.kept == ([batch] if kept else [])
    assert flow.version == int(success)
    assert flow.counters.get("skipped_steps", 0.0) == float(not success)
    assert flow.counters.get("retried_steps", 0.0) == float(kept)
