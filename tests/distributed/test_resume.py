"""Save and load on two processes: plain and distributed optimizer, experts, FP16 with an overflow, another layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.torchrun import torchrun


@pytest.mark.distributed
def test_steps_after_a_load_are_those_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    torchrun(Path(__file__).with_name("resume_worker.py"), str(tmp_path), processes=2)
