"""Half precision and faults on two processes, dense and mixture of experts, plain and distributed optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.torchrun import torchrun


@pytest.mark.distributed
def test_a_fault_on_one_rank_is_the_same_skipped_step_on_all_and_leaves_no_trace() -> None:
    torchrun(Path(__file__).with_name("precision_worker.py"), processes=2)
