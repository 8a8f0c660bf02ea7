"""Trajectories on disk come back as they were, and other files are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_vcpo.data.saved_batch import Origin, SavedBatchError, batch_path, load_batch, save_batch
from tests.oracle.trajectories import assert_same, trajectory

ORIGIN = Origin(version=12, temperature=0.7, engine_dtype="bfloat16", trainer_dtype="float32", router_replay="rollout")


def test_trajectories_and_their_origin_come_back_to_the_bit(tmp_path: Path) -> None:
    batch = [trajectory(routed_experts=np.arange(10, dtype=np.uint8).reshape(5, 1, 2)), trajectory(index=1)]
    path = batch_path(tmp_path, 12)
    save_batch(path, batch[:1], ORIGIN)
    save_batch(path, batch, ORIGIN)
    found, origin = load_batch(path)
    assert origin == ORIGIN
    for before, after in zip(batch, found, strict=True):
        assert_same(before, after)
    assert [p.name for p in path.parent.iterdir()] == ["version_0000012.npz"]


@pytest.mark.parametrize("content", [None, b"", b"no batch", "zip"], ids=["missing", "empty", "text", "other arrays"])
def test_another_file_is_refused_in_one_sentence(content: bytes | str | None, tmp_path: Path) -> None:
    path = tmp_path / "version_0000001.npz"
    if content == "zip":
        np.savez(path, something=np.zeros(3))
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(SavedBatchError, match="--rollout-save-batch") as caught:
        load_batch(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_batch_is_refused(tmp_path: Path) -> None:
    path = batch_path(tmp_path, 1)
    save_batch(path, [trajectory()], ORIGIN)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(SavedBatchError, match=str(path)):
        load_batch(path)
