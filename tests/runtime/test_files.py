"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_vcpo.runtime.files import cut_file, replace_bytes, replacing, sync


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: done.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")
    )
    rename = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, target: (done.append(f"rename {self.name}"), rename(self, target))
    )
    replace_bytes(tmp_path / "tracker.txt", b"12")
    assert done == ["sync tracker.txt.tmp", "rename tracker.txt.tmp", f"sync {tmp_path.name}"]
    assert (tmp_path / "tracker.txt").read_bytes() == b"12"


def test_what_fails_in_between_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "tracker.txt"
    path.write_bytes(b"10")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"1")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"tracker.txt": b"10"}


def test_a_folder_on_a_file_system_that_cannot_sync_folders_is_passed_over_and_a_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "file")


def test_what_is_cut_is_kept_under_the_next_free_name_and_a_cut_of_nothing_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for round_, rest in (("1", b"c\n"), ("2", b"d\n")):
        path.write_bytes(b"a\n" + rest)
        cut_file(path, kept=b"a\n", cut=rest)
        assert (tmp_path / f"metrics.cut.{round_}.jsonl").read_bytes() == rest
    before = path.stat()
    cut_file(path, kept=b"a\n", cut=b"")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(list(tmp_path.iterdir())) == 3
