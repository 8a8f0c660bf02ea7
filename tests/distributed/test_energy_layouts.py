"""Exact energies, and the steps taken with them, do not depend on the layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.oracle.single_process import single_process_megatron
from tests.oracle.torchrun import torchrun

_WORKER = Path(__file__).with_name("energy_worker.py")


def reference_results():
    """Energies [kinds, N] of every policy by autograd, and steps with every policy in two passes; on one process."""
    with single_process_megatron():
        from tests.distributed.energy_worker import POLICIES, STEPS, VARIANTS_OF_TWO
        from tests.distributed.layouts_worker import run
        from tests.oracle.energies import per_trajectory_energies, variant_model
        from tests.oracle.layouts import VOCAB, Layout, build, trajectories

        energies = {
            name: per_trajectory_energies(build(policy, Layout()).model[0], trajectories(), vocab_size=VOCAB)
            for name, policy in POLICIES.items()
        }
        variants = {
            name: per_trajectory_energies(variant_model(name), trajectories(), vocab_size=VOCAB)
            for name, _ in VARIANTS_OF_TWO
        }
        steps = {}
        for name, policy in STEPS.items():
            config = dataclasses.replace(policy.config, energy_method="two-pass")
            steps[name] = run(dataclasses.replace(policy, config=config), Layout())
    return {"energies": energies, "variants": variants, "steps": steps}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("energies") / "reference.pt"
    torch.save(reference_results(), path)
    return path


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.distributed
def test_every_layout_measures_and_trains_as_one_process_does(reference, processes):
    torchrun(_WORKER, str(reference), processes=processes)
