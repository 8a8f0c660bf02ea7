"""One owner for a folder that a run writes to: a kernel lock on a file in it, which goes with the process.

Rank 0 takes the locks of all ranks and tells them the answer, before a process group, a model or an engine exists. The
file stays; that it is there says nothing. Processes that rank 0 starts do not inherit the lock, so that none which
outlives it holds the folder.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from megatron_vcpo.checkpoint.save_folder import refuse_takeover
from megatron_vcpo.config import ConfigError, PluginConfig

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_PATIENCE = 5.0  # seconds: a process that was killed holds its files until its memory is given back
_HEARING = 60.0  # seconds: what the ranks' starts may differ by; later ones only learn that rank 0 is gone
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class FolderLock:
    """The lock of one folder, held until `close` or the end of this process.

    Args:
        folder: it is there already.
        flag: what named it.
        patience: how long to try. Seconds.

    Raises:
        ConfigError: another process holds it, or the file cannot be opened.
    """

    def __init__(self, folder: Path, flag: str, *, patience: float = _PATIENCE) -> None:
        path = folder / LOCK_FILE
        try:
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{flag} {folder}: the lock file {path} cannot be opened ({error.strerror}); make it writable, or "
                "choose another folder."
            ) from error
        os.register_at_fork(after_in_child=self.close)
        try:
            self.supported = self._wait(folder, flag, time.monotonic() + patience)
        except ConfigError:
            self.close()
            raise
        if self.supported:
            owner = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": datetime.now().isoformat(" ", "seconds"),
            }
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(owner).encode() + b"\n", 0)

    def close(self) -> None:
        """Let another process have the folder; in a forked child, this one keeps it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _wait(self, folder: Path, flag: str, deadline: float) -> bool:
        """True with the lock; False on a file system that has none."""
        assert self._descriptor is not None
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"{flag} {folder} is in use by another run ({_owner(self._descriptor)}); wait for its end, or "
                        "choose another folder."
                    ) from error
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise ConfigError(f"{flag} {folder}: {LOCK_FILE} cannot be locked ({error.strerror}).") from error
                return False
            else:
                return True


class FolderClaim:
    """The folders of --save and of the run's files, for this run alone. To be made by every rank, with the same flags.

    Where no flag names the run's folder, a new one is made under runs/ and put into `config.rollout.run_dir`.

    Args:
        args: Megatron's arguments.
        config: the plugin's.

    Raises:
        ConfigError: on every rank; another run has a folder, or --save holds checkpoints that this run would write
            over.
    """

    def __init__(self, args: argparse.Namespace, config: PluginConfig) -> None:
        self._locks: list[FolderLock] = []
        self._store: Any = None  # kept: rank 0 may be its server, and the process groups use it next
        answer = self._ask(args, lambda: self._take(args, config))
        if answer["refusal"] is not None:
            raise ConfigError(answer["refusal"])
        config.rollout.run_dir = answer["run_dir"]

    def close(self) -> None:
        """Let another run have the folders."""
        for lock in self._locks:
            lock.close()

    def _take(self, args: argparse.Namespace, config: PluginConfig) -> dict[str, str | None]:
        """On rank 0."""
        try:
            chosen = config.rollout.run_dir or args.save
            run_dir = Path(chosen) if chosen is not None else _new_folder()
            named = {"--rollout-run-dir": run_dir} if args.save is None else {"--save": Path(args.save)}
            if not run_dir.samefile(next(iter(named.values()))):
                named["--rollout-run-dir"] = run_dir
            for flag, folder in named.items():
                self._locks.append(FolderLock(folder, flag))
            if args.save is not None:
                refuse_takeover(args)  # again: a run may have ended in it since the flags were checked
        except ConfigError as error:
            return {"refusal": str(error), "run_dir": None}
        for folder, lock in zip(named.values(), self._locks, strict=True):
            if not lock.supported:
                logger.warning(
                    f"note: the file system of {folder} knows no locks (flock): nothing keeps a second run out of this "
                    "folder; start none there."
                )
        return {"refusal": None, "run_dir": str(run_dir)}

    def _ask(self, args: argparse.Namespace, take: Callable[[], dict[str, str | None]]) -> dict[str, str | None]:
        """What rank 0 says, on every rank."""
        if args.world_size == 1:
            return take()
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        key = f"megatron_vcpo/folders/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        try:
            self._store, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
            if args.rank == 0:
                answer = take()
                self._store.set(key, json.dumps(answer))
                if answer["refusal"] is not None:
                    self._let_hear(f"{key}/heard", args.world_size - 1)
                return answer
            self._store.wait([key], timeout)
            answer = json.loads(self._store.get(key))
            self._store.add(f"{key}/heard", 1)
            return answer
        except DistError as error:
            raise ConfigError(
                f"rank {args.rank} did not hear from rank 0 within {timeout.total_seconds():.0f} s whether the run's "
                f"folders are free ({str(error).splitlines()[0]}); see what rank 0 says, and MASTER_ADDR, MASTER_PORT."
            ) from error

    def _let_hear(self, key: str, others: int) -> None:
        """Wait for the other ranks before this one ends, and with it, maybe, the store."""
        deadline = time.monotonic() + _HEARING
        while self._store.add(key, 0) < others and time.monotonic() < deadline:
            time.sleep(0.05)


def _owner(descriptor: int) -> str:
    """Who holds a lock, as its file says."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "its process has not said which it is"


def _new_folder() -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    number = 0
    while True:
        folder = Path("runs") / (stamp if number == 0 else f"{stamp}.{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be made ({error.strerror}); name a folder with --rollout-run-dir."
            ) from error
        else:
            return folder
