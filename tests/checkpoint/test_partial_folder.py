"""PartialFolder: complete or not there, and resumed where it was."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from megatron_vcpo.checkpoint.partial_folder import PartialFolder
from megatron_vcpo.models.errors import CheckpointError

SETTINGS = {"source": "a", "dtype": "bf16"}


def write(folder: PartialFolder, name: str, text: str, record: object = None) -> None:
    with folder.file(name) as part:
        part.path.write_text(text)
        part.record = record


def test_the_name_appears_with_everything_in_it(tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "out", SETTINGS)
    write(folder, "release/a", "1")
    assert not (tmp_path / "out").exists()
    folder.commit()
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"release", "conversion.json"}
    assert json.loads((tmp_path / "out" / "conversion.json").read_text()) == SETTINGS


def test_what_was_finished_is_known_when_it_is_resumed(tmp_path: Path) -> None:
    first = PartialFolder(tmp_path / "out", SETTINGS)
    write(first, "a", "1", {"bytes": [1, 2]})
    write(first, "b", "22")
    first.close()
    (tmp_path / "out.partial" / "b").write_text("2")  # not what was written
    (tmp_path / "out.partial" / "c").write_text("333")  # never finished
    with (tmp_path / "out.partial" / "journal.jsonl").open("a") as journal:
        journal.write('{"file": "c", "byt')  # killed in the middle of a line
    second = PartialFolder(tmp_path / "out", SETTINGS)
    assert second.finished == {"a": {"bytes": [1, 2]}}
    write(second, "c", "4444")
    second.close()
    assert set(PartialFolder(tmp_path / "out", SETTINGS).finished) == {"a", "c"}


def test_other_settings_do_not_continue_it(tmp_path: Path) -> None:
    PartialFolder(tmp_path / "out", SETTINGS).close()
    with pytest.raises(CheckpointError, match=r"out\.partial holds the beginning of a conversion with another dtype"):
        PartialFolder(tmp_path / "out", SETTINGS | {"dtype": "fp16"})


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "out", SETTINGS)
    with pytest.raises(CheckpointError, match="Another process is writing"):
        PartialFolder(tmp_path / "out", SETTINGS)
    folder.close()


def test_only_an_earlier_conversion_is_overwritten_and_only_by_a_complete_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    first = PartialFolder(target, SETTINGS)
    write(first, "a", "old")
    first.commit()
    with pytest.raises(CheckpointError, match="--overwrite"):
        PartialFolder(target, SETTINGS)
    second = PartialFolder(target, SETTINGS, overwrite=True)
    write(second, "a", "new")
    assert (target / "a").read_text() == "old"
    second.commit()
    assert (target / "a").read_text() == "new"
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    (target / "conversion.json").unlink()  # now it could be anything, such as a training run's folder
    with pytest.raises(CheckpointError, match="remove it yourself"):
        PartialFolder(target, SETTINGS, overwrite=True)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError(
            "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
        ),  # all that torch.save says
    ],
)
def test_a_full_disk_is_one_sentence_and_loses_nothing(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "out.partial" / "b.tmp"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 0 if half.exists() else 10**9))
    folder = PartialFolder(tmp_path / "out", SETTINGS)
    write(folder, "a", "1")

    def fail() -> None:
        with folder.file("b") as part:
            part.path.write_text("half")
            raise error

    with pytest.raises(CheckpointError, match="is full; free some space and give the same command again"):
        fail()
    folder.close()
    assert {p.name for p in (tmp_path / "out.partial").iterdir()} == {"a", "journal.jsonl"}
    assert set(PartialFolder(tmp_path / "out", SETTINGS).finished) == {"a"}


def test_other_errors_keep_their_own_words(tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "out", SETTINGS)
    with pytest.raises(ValueError, match="wrong"), folder.file("a"):
        raise ValueError("wrong")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = PartialFolder(tmp_path / "out", SETTINGS)
    write(folder, "a", "1")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, 3 * 10**9))
    assert folder.missing_bytes({"a": 10**12, "b": 2 * 10**9}) == 2 * 10**9
    with pytest.raises(CheckpointError, match=r"has 3\.0 GB free, and 4\.0 GB are still to be written"):
        folder.missing_bytes({"b": 2 * 10**9, "c": 2 * 10**9})


@pytest.mark.parametrize("damage", [b"\x00\x00\n", b"[]\n", b'{"x": 1}\n', b"\xff\xfe\n"])
def test_a_damaged_journal_is_named(tmp_path: Path, damage: bytes) -> None:
    folder = PartialFolder(tmp_path / "out", SETTINGS)
    write(folder, "a", "1")
    folder.close()
    journal = next((tmp_path / "out.partial").glob("journal.jsonl"))
    journal.write_bytes(journal.read_bytes() + damage)
    with pytest.raises(CheckpointError, match=r"journal of .*out\.partial is damaged .* remove that folder"):
        PartialFolder(tmp_path / "out", SETTINGS)


@pytest.mark.parametrize("settings", [b"3", b"[]", b'"x"', b"null"])
def test_a_journal_whose_settings_are_none_is_named(tmp_path: Path, settings: bytes) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "journal.jsonl").write_bytes(b'{"settings": ' + settings + b"}\n")
    with pytest.raises(CheckpointError, match=r"journal of .*out\.partial is damaged|another dtype, source"):
        PartialFolder(tmp_path / "out", SETTINGS)


def test_files_that_a_killed_process_left_are_not_published(tmp_path: Path) -> None:
    first = PartialFolder(tmp_path / "out", SETTINGS)
    write(first, "release/a", "1")
    first.close()
    for name in (".tmpXq3", "b.tmp", "release/.tmpYz1", "release/c"):
        (tmp_path / "out.partial" / name).write_text("half")
    second = PartialFolder(tmp_path / "out", SETTINGS)
    write(second, "b", "2")
    second.commit()
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {"release/a", "b", "conversion.json"}


def test_a_file_that_no_conversion_wrote_is_not_published(tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "out", SETTINGS)
    write(folder, "a", "1")
    for name in ("b", "c"):
        (folder.path / name).write_text("2")
    folder.adopt("b")
    with pytest.raises(CheckpointError, match=r"out\.partial holds c, which this conversion did not write"):
        folder.commit()
    (folder.path / "c").unlink()
    folder.commit()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"a", "b", "conversion.json"}


@pytest.mark.parametrize("name", ["out.partial", "out.old"])
@pytest.mark.parametrize("files", [{"thesis.txt": "years"}, {"thesis.txt": "years", "journal.jsonl": ""}])
def test_what_it_did_not_make_stays(tmp_path: Path, name: str, files: dict[str, str]) -> None:
    (tmp_path / name).mkdir()
    for file, text in files.items():
        (tmp_path / name / file).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name} is in the way"):
        PartialFolder(tmp_path / "out", SETTINGS)
    assert {p.name: p.read_text() for p in (tmp_path / name).iterdir()} == files


@pytest.mark.parametrize("target", ["/", ".."])
def test_a_target_without_a_name_is_refused(target: str) -> None:
    with pytest.raises(CheckpointError, match="is not the name of a folder that can be made"):
        PartialFolder(Path(target), SETTINGS)


def test_a_symbolic_link_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"out is a symbolic link to .*nowhere; name the folder itself"):
        PartialFolder(tmp_path / "out", SETTINGS)
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


def test_a_discarded_folder_leaves_nothing(tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "out", SETTINGS)
    write(folder, "a", "1")
    folder.discard()
    assert not list(tmp_path.iterdir())
