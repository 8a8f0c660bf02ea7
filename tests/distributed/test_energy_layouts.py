"""Exact energies do not depend on the layout: every one of them equals per-trajectory autograd on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.oracle.single_process import single_process_megatron
from tests.oracle.torchrun import torchrun

_WORKER = Path(__file__).with_name("energy_worker.py")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """[kinds, N] of every policy, as a file."""
    with single_process_megatron():
        from tests.distributed.energy_worker import POLICIES
        from tests.oracle.energies import per_trajectory_energies
        from tests.oracle.layouts import VOCAB, Layout, build, trajectories

        energies = {
            name: per_trajectory_energies(build(policy, Layout()).model[0], trajectories(), vocab_size=VOCAB)
            for name, policy in POLICIES.items()
        }
    path = tmp_path_factory.mktemp("energies") / "reference.pt"
    torch.save(energies, path)
    return path


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.distributed
def test_every_layout_measures_the_energies_of_one_process(reference, processes):
    torchrun(_WORKER, str(reference), processes=processes, passed="all layouts passed")
