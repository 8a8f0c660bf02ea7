"""Routing replay: whatever the layout, routes, log-probs and steps are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.oracle.single_process import single_process_megatron
from tests.oracle.torchrun import torchrun

_WORKER = Path(__file__).with_name("replay_worker.py")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Every policy on one process, as a file and as it is."""
    with single_process_megatron():
        from tests.distributed.replay_worker import POLICIES, run
        from tests.oracle.layouts import Layout

        results = {name: run(policy, Layout()) for name, policy in POLICIES.items()}
    path = tmp_path_factory.mktemp("replay") / "reference.pt"
    torch.save(results, path)
    return path, results


@pytest.mark.distributed
def test_the_reference_is_worth_comparing_with(reference):
    """Routers disagree with what is forced on them, and layers with experts are where they should be."""
    results = reference[1]
    assert [results[name]["layers"] for name in ("experts", "dense_first", "dense_stage")] == [
        [1, 2, 3, 4],
        [2, 3, 4],
        [3, 4],
    ]
    for result in results.values():
        first = result["metrics"][0]
        assert first["n_micro_batches"] > 4
        assert first["route_disagree_tokens"] > 0.5
        assert 0.1 < first["route_missing"] < 0.4
        for number in result["layers"]:
            assert 0.0 < first[f"route_agreement/layer_{number - 1}"] < 0.6
    assert results["experts"]["metrics"][1]["kl"] > 1e-6


@pytest.mark.distributed
def test_every_layout_replays_what_one_process_does(reference):
    torchrun(_WORKER, str(reference[0]), processes=2)
