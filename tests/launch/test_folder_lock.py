"""Who owns a folder that a run writes to."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vcpo.config import ConfigError, PluginConfig
from megatron_vcpo.launch import folder_lock
from megatron_vcpo.launch.folder_lock import LOCK_FILE, FolderClaim, FolderLock
from tests.oracle.forked import forked_python

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # of a lock that will come

MEMBER = """
import json, sys
from types import SimpleNamespace
import torch
from megatron_vcpo.config import ConfigError, PluginConfig
from megatron_vcpo.launch.folder_lock import FolderClaim

rank, save = int(sys.argv[1]), sys.argv[2] or None
args = SimpleNamespace(rank=rank, world_size=2, save=save, load=None, finetune=False, distributed_timeout_minutes=2)
config = PluginConfig()
try:
    claim = FolderClaim(args, config)
except ConfigError as error:
    print(json.dumps({"refusal": str(error)}))
    sys.exit(2)
torch.distributed.init_process_group("gloo")  # the store of the answer is in nobody's way
count = torch.ones(1)
torch.distributed.all_reduce(count)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
print(json.dumps({"run_dir": config.rollout.run_dir, "ranks": count.item()}))
"""


def arguments(save: Path | None, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(rank=0, world_size=1, save=save and str(save), load=None, finetune=False, **more)


def test_a_second_owner_is_refused_by_the_pid_and_host_of_the_first_until_that_one_closes(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, "--save")
    with pytest.raises(ConfigError) as caught:
        FolderLock(tmp_path, "--save", patience=0.0)
    owner = f"process {os.getpid()} on {socket.gethostname()}, since 20"
    assert f"--save {tmp_path} is in use by another run ({owner}" in str(caught.value)
    threading.Timer(0.3, first.close).start()
    FolderLock(tmp_path, "--save", patience=PATIENCE).close()


def test_a_killed_owner_holds_nothing_even_where_a_process_that_it_forked_lives_on(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        FolderLock(tmp_path, "--save")
        survivor = os.fork()
        if survivor == 0:
            os.close(reading)
            signal.pause()
        os.write(writing, str(survivor).encode())
        signal.pause()
    survivor = int(os.read(reading, 20))
    try:
        with pytest.raises(ConfigError, match=f"process {owner} on"):
            FolderLock(tmp_path, "--save", patience=0.0)
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        FolderLock(tmp_path, "--save", patience=1.0).close()
    finally:
        os.kill(survivor, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    config = PluginConfig()
    FolderClaim(arguments(tmp_path), config).close()
    assert f"the file system of {tmp_path} knows no locks (flock)" in capsys.readouterr().err
    assert not (tmp_path / LOCK_FILE).read_bytes()  # it has no owner


def test_what_is_no_lock_file_or_cannot_be_locked_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / LOCK_FILE).mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"--save .*/a: the lock file .*/run\.lock cannot be opened \(Is a directory\)"
    ):
        FolderLock(tmp_path / "a", "--save")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ConfigError, match=r"run\.lock cannot be locked \(Input/output error\)"):
        FolderLock(tmp_path, "--save")


def test_one_folder_under_two_names_is_locked_once_and_two_folders_twice(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    config = PluginConfig()
    config.rollout.run_dir = str(tmp_path / "link")
    FolderClaim(arguments(tmp_path / "run"), config).close()
    (tmp_path / "other").mkdir()
    config.rollout.run_dir = str(tmp_path / "other")
    claim = FolderClaim(arguments(tmp_path / "run"), config)
    for folder, flag in (("run", "--save"), ("other", "--rollout-run-dir")):
        with pytest.raises(ConfigError, match=f"{flag} .*/{folder} is in use"):
            FolderLock(tmp_path / folder, flag, patience=0.0)
    claim.close()


def test_runs_without_a_name_get_folders_of_their_own_within_one_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Clock(folder_lock.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(folder_lock, "datetime", Clock)
    configs = [PluginConfig(), PluginConfig()]
    claims = [FolderClaim(arguments(None), config) for config in configs]
    assert [config.rollout.run_dir for config in configs] == ["runs/2026-01-02_03-04-05", "runs/2026-01-02_03-04-05.1"]
    for claim in claims:
        claim.close()


def launch(folder: Path, save: str) -> list[tuple[int, dict[str, Any]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
    }
    members = [
        subprocess.Popen(
            [*forked_python(), "-W", "ignore", "-c", MEMBER, str(rank), save],
            cwd=folder,
            env=environment | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [member.communicate(timeout=900)[0] for member in members]
    return [(member.returncode, json.loads(output)) for member, output in zip(members, outputs, strict=True)]


@pytest.mark.slow
def test_all_ranks_hear_the_answer_of_rank_0_and_meet_afterwards(tmp_path: Path) -> None:
    answers = launch(tmp_path, "")
    assert [code for code, _ in answers] == [0, 0]
    assert answers[0][1] == answers[1][1]
    assert answers[0][1]["ranks"] == 2.0
    assert (tmp_path / answers[0][1]["run_dir"] / LOCK_FILE).is_file()
    mine = FolderLock(tmp_path, "--save")
    answers = launch(tmp_path, str(tmp_path))
    mine.close()
    assert [code for code, _ in answers] == [2, 2]
    assert all(f"in use by another run (process {os.getpid()}" in answer["refusal"] for _, answer in answers)


def test_checkpoints_that_came_between_the_checks_and_the_lock_are_not_taken_over(tmp_path: Path) -> None:
    checkpoint = tmp_path / "iter_0000004"
    checkpoint.mkdir()
    for name in (".metadata", "metadata.json"):
        (checkpoint / name).write_text("")
    with pytest.raises(ConfigError, match="iter_0000004"):
        FolderClaim(arguments(tmp_path), PluginConfig())
