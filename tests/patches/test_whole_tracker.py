"""The file that names the latest checkpoint is never half there, and only because of the patch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_vcpo.checkpoint.torch_dist import TRACKER
from megatron_vcpo.patches import whole_tracker
from tests.oracle.single_process import single_process_megatron


@pytest.fixture
def checkpointing(monkeypatch: pytest.MonkeyPatch) -> Any:
    with single_process_megatron():
        from megatron.training import checkpointing as module

        stock = getattr(module.maybe_msc, "stock", module.maybe_msc)
        monkeypatch.setattr(module, "maybe_msc", stock)
        yield module


def write(checkpointing: Any, folder: Path, text: str) -> None:
    """As save_checkpoint() does; its source is looked at, too."""
    with checkpointing.maybe_msc.open(str(folder / TRACKER), "w") as file:
        file.write(text)
        assert (folder / TRACKER).exists()
        assert (folder / TRACKER).read_text() == "2"


def test_stock_megatron_still_writes_the_tracker_in_place(checkpointing: Any, tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("2")
    source = Path(checkpointing.__file__).read_text()
    assert "with maybe_msc.open(tracker_filename, 'w') as f:\n                    f.write(" in source
    with pytest.raises(AssertionError):  # empty, for a moment
        write(checkpointing, tmp_path, "4")


def test_the_tracker_changes_at_once_after_all_files_of_the_checkpoint_are_on_the_disk(
    checkpointing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_tracker.apply()
    whole_tracker.apply()
    (tmp_path / TRACKER).write_text("2")
    state = tmp_path / "iter_0000004" / "mp_rank_00" / "train_dataloader_dprank000.pt"
    state.parent.mkdir(parents=True)
    state.write_text("")
    (tmp_path / "iter_0000004" / "metadata.json").write_text("")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
    write(checkpointing, tmp_path, "4")
    assert (tmp_path / TRACKER).read_text() == "4"
    assert set(synced[:-2]) == {state.name, "mp_rank_00", "metadata.json", "iter_0000004", tmp_path.name}
    assert synced.index(state.name) < synced.index("mp_rank_00") < synced.index("iter_0000004")
    assert synced[-2:] == [f"{TRACKER}.tmp", tmp_path.name]
    (tmp_path / "release").mkdir()
    with checkpointing.maybe_msc.open(str(tmp_path / TRACKER), "w") as file:
        file.write("release")
    assert (tmp_path / TRACKER).read_text() == "release"


def test_other_files_and_what_is_read_are_megatrons(checkpointing: Any, tmp_path: Path) -> None:
    whole_tracker.apply()
    (tmp_path / TRACKER).write_text("2")
    with checkpointing.maybe_msc.open(str(tmp_path / TRACKER), "r") as file:
        assert file.read() == "2"
    with checkpointing.maybe_msc.open(str(tmp_path / "other.txt"), "w") as file:
        file.write("x")
    assert checkpointing.maybe_msc.os is os
    assert (tmp_path / "other.txt").read_text() == "x"
