"""Which sentence an error that ends a run becomes."""

from __future__ import annotations

import errno
import os
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_vcpo.launch import failures
from megatron_vcpo.launch.failures import failure_sentence
from megatron_vcpo.observability.metrics import MetricsFileError

ROOM = 1 << 40


@pytest.fixture
def args(tmp_path, monkeypatch) -> Any:
    monkeypatch.setattr(failures.shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(ROOM))
    return SimpleNamespace(save=str(tmp_path / "save"), load=None, ckpt_step=None)


def raised(error: BaseException, within: type[BaseException] | None = None) -> BaseException:
    """The error as it is caught, in the handler of another one."""
    try:
        try:
            raise error
        except BaseException as cause:
            if within is None:
                raise
            raise within("something went wrong") from cause
    except BaseException as caught:  # noqa: BLE001
        return caught


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("within", [None, RuntimeError])
def test_a_full_disk_is_one_sentence_with_the_file_wherever_it_comes_from(args, code, within):
    said = failure_sentence(raised(OSError(code, "it is full", "/a/metrics.jsonl"), within), args, None)
    assert said is not None
    assert said.startswith(
        f"the disk is full: /a/metrics.jsonl could not be written ({os.strerror(code)}). Free some space"
    )


def test_a_full_disk_without_a_file_names_the_folder_that_is_full(args, monkeypatch, tmp_path):
    folders = {str(tmp_path / "save"): ROOM, str(tmp_path / "run"): 0}
    monkeypatch.setattr(failures, "_free", folders.__getitem__)
    said = failure_sentence(OSError(errno.ENOSPC, "full"), args, str(tmp_path / "run"))
    assert said is not None
    assert f"full: {tmp_path / 'run'} could not" in said


def test_other_errors_of_the_system_and_of_programs_keep_their_trace(args):
    assert failure_sentence(raised(OSError(errno.EACCES, "no", "/a/b")), args, None) is None
    assert failure_sentence(raised(ValueError("x"), RuntimeError), args, None) is None


def test_a_damaged_metrics_file_explains_itself(args):
    assert failure_sentence(raised(MetricsFileError("line 3 is bad")), args, None) == "line 3 is bad"


def load_checkpoint(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("collected", [False, True])
def test_a_checkpoint_that_does_not_load_is_named_with_the_first_reason(args, monkeypatch, collected):
    monkeypatch.setattr(failures, "_raised_in", lambda *_: True)
    args.load, args.ckpt_step = "/a/ck", 7
    reason: Any = EOFError("Ran out\n of input")
    said = failure_sentence(CheckpointException("x", {0: (reason, [])}) if collected else reason, args, None)
    assert said is not None
    assert said.startswith(
        "the checkpoint (iteration 7 of --load /a/ck) could not be loaded: EOFError: Ran out of input. Either"
    )
    assert failure_sentence(AttributeError("a bug"), args, None) is None


def test_a_save_whose_manager_process_was_ended_says_what_is_left(args, monkeypatch):
    monkeypatch.setattr(failures, "_raised_in", lambda _, file, function: "multiprocessing/managers.py" in file)
    said = failure_sentence(ConnectionRefusedError(111, "Connection refused"), args, None)
    assert said is not None
    assert said.startswith("the process that collects what a checkpoint's writers wrote was ended from outside")
    assert f"--save {args.save}" in said


def test_only_what_passed_through_a_function_was_raised_in_it():
    with pytest.raises(ValueError) as caught:
        load_checkpoint(ValueError("x"))
    assert failures._raised_in(caught.value, "tests/launch/test_failures.py", "load_checkpoint")
    assert not failures._raised_in(caught.value, "tests/launch/test_failures.py", "save_checkpoint")
    assert not failures._raised_in(caught.value, "other.py", "load_checkpoint")
