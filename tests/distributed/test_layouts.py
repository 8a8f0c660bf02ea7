"""The contract: whatever the layout, a step's numbers are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.oracle.single_process import single_process_megatron
from tests.oracle.torchrun import torchrun

_WORKER = Path(__file__).with_name("layouts_worker.py")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Two steps of every policy on one process, as a file and as it is."""
    with single_process_megatron():
        from tests.distributed.layouts_worker import POLICIES, run
        from tests.oracle.layouts import Layout

        results = {name: run(policy, Layout()) for name, policy in POLICIES.items()}
    path = tmp_path_factory.mktemp("layouts") / "reference.pt"
    torch.save(results, path)
    return path, results


@pytest.mark.slow
def test_the_reference_is_worth_comparing_with(reference):
    """It trains: rho moves, baselines and penalties are there, and parameters of every kind change."""
    for name, result in reference[1].items():
        first, second = result["metrics"]
        assert 0.1 < first["rho"] < 0.99, name
        assert first["rho"] != second["rho"]
        assert first["grad_norm"] > 0.01
        assert abs(first["baseline"]) > 0.01
    assert reference[1]["tied"]["metrics"][1]["kl"] > 1e-6


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.distributed
def test_every_layout_takes_the_same_steps_as_one_process(reference, processes):
    torchrun(_WORKER, str(reference[0]), processes=processes)
