"""What the folders of --load and --save may hold before a run starts, and what a save leaves of what is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vcpo.checkpoint.save_folder import check_folders, is_complete, newest_complete, set_aside
from megatron_vcpo.checkpoint.torch_dist import TRACKER
from megatron_vcpo.config import ConfigError


def checkpoint(folder: Path, iteration: int, *, complete: bool = True) -> Path:
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", *(["metadata.json"] if complete else [])):
        (path / name).write_text(str(iteration))
    return path


def arguments(folder: Path, **changes: Any) -> SimpleNamespace:
    values = {"load": str(folder), "save": str(folder), "ckpt_step": None, "finetune": False, "iteration": 0}
    return SimpleNamespace(**values | changes)


def refusal(args: SimpleNamespace) -> str:
    with pytest.raises(ConfigError) as caught:
        check_folders(args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two complete checkpoints and the beginning of a third, and no tracker."""
    for iteration in (5, 10):
        checkpoint(tmp_path, iteration)
    checkpoint(tmp_path, 15, complete=False)
    checkpoint(tmp_path, 20).rename(tmp_path / "iter_0000020.copy")
    return tmp_path


def test_the_newest_complete_checkpoint_is_the_one_whose_last_file_is_there(run: Path) -> None:
    assert newest_complete(run) == run / "iter_0000010"
    (run / "iter_0000012" / "mp_rank_00").mkdir(parents=True)
    assert newest_complete(run) == run / "iter_0000010"
    (run / "iter_0000012" / "mp_rank_00" / "model_optim_rng.pt").write_text("")
    assert newest_complete(run) == run / "iter_0000012"
    checkpoint(run, 12345678)
    assert newest_complete(run) == run / "iter_12345678"


def test_checkpoints_without_a_tracker_are_not_written_over_and_the_sentence_names_the_way_on(run: Path) -> None:
    assert refusal(arguments(run)) == (
        f"--load {run}: no {TRACKER} says which checkpoint is the latest; the newest complete one is iter_0000010: "
        "give --ckpt-step 10 to go on from it."
    )
    assert refusal(arguments(run, load=None)) == (
        f"--save {run} holds checkpoints (the newest complete one is iter_0000010) that this run would not go on from "
        f"but write over; give --load {run} --ckpt-step 10 to go on, or choose another --save."
    )
    args = arguments(run, ckpt_step=10)
    check_folders(args)
    assert args.load == str(run)


def test_nothing_but_a_torn_first_save_is_begun_again(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5, complete=False)
    args = arguments(tmp_path)
    check_folders(args)
    assert args.load is None


@pytest.mark.parametrize("load", ["other", None])
def test_a_run_that_starts_elsewhere_does_not_save_among_anothers_checkpoints(run: Path, load: str | None) -> None:
    (run / TRACKER).write_text("10")
    other = run / "other"
    checkpoint(other, 3)
    (other / TRACKER).write_text("3")
    said = refusal(arguments(run, load=load and str(other)))
    assert said.endswith(f"give --load {run} to go on, or choose another --save.")
    check_folders(arguments(run, load=str(other), save=None))
    check_folders(arguments(run, load=f"{run}/"))  # the same folder
    assert "with --finetune a new run would write over them" in refusal(arguments(run, finetune=True))
    check_folders(arguments(run, finetune=True, save=str(run / "new")))


@pytest.mark.parametrize(
    ("tracker", "said"),
    [
        (b"", "is empty and not the number of an iteration; remove it and give --ckpt-step 10 for iter_0000010"),
        (b"\n\n \n", "is empty and not the number of an iteration; remove it and give --ckpt-step 10"),
        (b"5\n\n10\n", r"holds '5\n\n10\n' and not the number of an iteration; remove it"),
        (b"-5", "holds '-5' and not"),
        (b"1_0", "holds '1_0' and not"),
        (b"\xff\xfe", "cannot be read"),
        (b"7", "the checkpoint iter_0000007 that latest_checkpointed_iteration.txt names is missing or empty; give "
               "--ckpt-step 10 for iter_0000010, the newest complete checkpoint."),
        (None, "is not a file; remove it and give --ckpt-step 10"),
    ],
)  # fmt: skip
def test_a_bad_tracker_is_one_sentence_with_the_way_on(run: Path, tracker: bytes | None, said: str) -> None:
    if tracker is None:
        (run / TRACKER).mkdir()
    else:
        (run / TRACKER).write_bytes(tracker)
    assert said in refusal(arguments(run))
    if tracker != b"7":  # Megatron reads it before it looks at --ckpt-step, and would end with code 0
        assert said in refusal(arguments(run, ckpt_step=10))
    for iteration in (5, 10):
        (run / f"iter_{iteration:07d}" / "metadata.json").unlink()
    assert "no complete checkpoint is there; choose another folder" in refusal(arguments(run))


def test_a_tracker_with_blank_lines_around_its_number_is_read_as_megatron_reads_it(run: Path) -> None:
    (run / TRACKER).write_text("\n 5 \n\n")
    check_folders(arguments(run))


def test_a_step_that_is_not_there_or_no_step_is_refused_by_its_flag(run: Path) -> None:
    (run / TRACKER).write_text("10")
    assert "iter_0000007 that --ckpt-step names is missing" in refusal(arguments(run, ckpt_step=7))
    for step in (0, -3):
        assert f"--ckpt-step {step} is not the number" in refusal(arguments(run, ckpt_step=step))


@pytest.mark.parametrize("latest", ["10", "6"])
def test_a_complete_checkpoint_is_kept_under_another_name_and_the_tracker_never_names_what_is_gone(
    run: Path, latest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / TRACKER).write_text(latest)
    args = arguments(run, iteration=5)
    for number in (1, 2):
        set_aside(args, 10)
        assert not (run / "iter_0000010").exists()
        assert is_complete(run / f"replaced_iter_0000010.{number}")
        assert (run / TRACKER).read_text() == ("5" if latest == "10" else latest)
        assert f"it is kept as replaced_iter_0000010.{number}" in capsys.readouterr().err
        checkpoint(run, 10)
    assert newest_complete(run) == run / "iter_0000010"


def test_without_an_earlier_checkpoint_the_tracker_of_a_replaced_one_goes(run: Path) -> None:
    (run / TRACKER).write_text("10")
    set_aside(arguments(run, load=None), 10)
    assert not (run / TRACKER).exists()


def test_the_beginning_of_a_checkpoint_is_written_over(run: Path) -> None:
    set_aside(arguments(run, iteration=10), 15)
    assert (run / "iter_0000015").is_dir()
    assert not list(run.glob("replaced*"))
