"""PartialFolder: an output folder that gets its name only when it is complete, and can be resumed.

    out.partial/     while it is being written, with a journal of the finished files
    out/             afterwards; conversion.json in it says what it was made from

A killed conversion leaves only `out.partial`, which cannot be loaded because the files needed for that come last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.runtime.files import sync

PROVENANCE = "conversion.json"
_JOURNAL = "journal.jsonl"
_FULL_DISK_BYTES = 1 << 20  # a write that fails with less free space than this is blamed on a full disk


@dataclass
class PartFile:
    """A file being written."""

    path: Path  # a temporary name
    record: Any = field(default=None)  # kept in the journal for a resumed conversion


class PartialFolder:
    """The output of one conversion.

    Args:
        target: the folder to create.
        settings: what the output depends on (JSON); a partial folder with other settings is refused.
        overwrite: replace a finished conversion at `target`, once the new one is complete.

    Raises:
        CheckpointError: something is in the way; the message, one sentence, says what.
    """

    def __init__(self, target: Path, settings: dict[str, Any], *, overwrite: bool = False) -> None:
        self.target = target.absolute()
        if self.target.name in ("", ".."):
            raise CheckpointError(f"{target} is not the name of a folder that can be made; name a new one.")
        self.path = self.target.with_name(self.target.name + ".partial")
        self._old = self.target.with_name(self.target.name + ".old")
        self._settings = settings
        self._refuse_target(overwrite)
        self._refuse_foreign()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._journal: IO[str] = (self.path / _JOURNAL).open("a+")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}.") from error
        self._lock()
        self.finished: dict[str, Any] = {}
        self._resume()

    def missing_bytes(self, sizes: dict[str, int]) -> int:
        """Bytes of the planned files (name -> bytes) not yet written; CheckpointError if the disk is too small for
        them."""
        needed = sum(size for name, size in sizes.items() if name not in self.finished)
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise CheckpointError(
                f"{self.path.parent} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are still to be written."
            )
        return needed

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[PartFile]:
        """Write one file under a temporary name; once on disk it gets its final name and a line in the journal."""
        final = self.path / name
        final.parent.mkdir(parents=True, exist_ok=True)
        part = PartFile(final.with_name(final.name + ".tmp"))
        try:
            yield part
            self._let_read(part.path)
            sync(part.path)
            part.path.rename(final)
            sync(final.parent)
            self._note({"file": name, "bytes": final.stat().st_size, "record": part.record})
        except Exception as error:
            full = self._disk_is_full(error)  # before removing the partial file frees space
            part.path.unlink(missing_ok=True)
            if not full:
                raise
            raise CheckpointError(
                f"The disk of {self.path} is full; free some space and give the same command again: it goes on after "
                f"the {len(self.finished)} files that are finished."
            ) from error
        self.finished[name] = part.record

    def write_text(self, name: str, text: str) -> None:
        """Write a small file, replacing one that exists."""
        with self.file(name) as part:
            part.path.write_text(text)

    def adopt(self, name: str) -> None:
        """Enter a complete file that another package wrote under its final name in the journal."""
        path = self.path / name
        self._let_read(path)
        sync(path)
        self._note({"file": name, "bytes": path.stat().st_size, "record": None})
        self.finished[name] = None

    def adopt_all(self) -> None:
        """`adopt` every file that is not in the journal, after another package has written them all."""
        for path in sorted(self._strays()):
            self.adopt(str(path.relative_to(self.path)))

    def commit(self) -> None:
        """Give the folder its final name. It must be complete.

        Raises:
            CheckpointError: it holds a file that is not in the journal.
        """
        self.write_text(PROVENANCE, json.dumps(self._settings, indent=2) + "\n")
        if strays := [str(path.relative_to(self.path)) for path in self._strays()]:
            raise CheckpointError(
                f"{self.path} holds {', '.join(sorted(strays)[:3])}, which this conversion did not write; take it out "
                "and give the same command again."
            )
        if self.target.exists():
            shutil.rmtree(self._old, ignore_errors=True)
            self.target.rename(self._old)
        self.path.rename(self.target)
        sync(self.target.parent)
        self._journal.close()
        (self.target / _JOURNAL).unlink()
        shutil.rmtree(self._old, ignore_errors=True)

    def close(self) -> None:
        """Release the lock, so that another process can use the folder."""
        self._journal.close()

    def discard(self) -> None:
        """Remove what was written, if a later run could not continue from it."""
        shutil.rmtree(self.path)
        self._journal.close()

    def _refuse_foreign(self) -> None:
        """Refuse files beside the target that have the names used here but were not made by this class."""
        journal = self.path / _JOURNAL
        if _is_filled(self.path) and not (journal.is_file() and (journal.stat().st_size or _is_alone(journal))):
            raise CheckpointError(
                f"{self.path} is in the way: it holds no conversion that was begun; move it or choose another folder."
            )
        if _is_filled(self._old) and not (self._old / PROVENANCE).is_file():
            raise CheckpointError(
                f"{self._old} is in the way: no converter wrote it; move it or choose another folder."
            )

    def _refuse_target(self, overwrite: bool) -> None:
        if self.target.is_symlink():
            raise CheckpointError(
                f"{self.target} is a symbolic link to {os.readlink(self.target)}; name the folder itself."
            )
        if not _is_filled(self.target):
            return
        if not overwrite:
            raise CheckpointError(f"{self.target} exists already; choose another folder or give --overwrite.")
        if not (self.target / PROVENANCE).is_file():
            raise CheckpointError(
                f"{self.target} was not written by a converter (it holds no {PROVENANCE}), and --overwrite removes "
                "nothing else; remove it yourself or choose another folder."
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"Another process is writing {self.path} now; wait for it or end it.") from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # the file system has no locks
                raise

    def _resume(self) -> None:
        """Read the journal: the settings in its first line, then one line for each finished file."""
        self._journal.seek(0)
        try:
            text = self._journal.read()
            # ignore an incomplete last line, from a process that was killed
            lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
            settings = dict(lines[0]["settings"]) if lines else {}
            files = [(str(line["file"]), int(line["bytes"]), line["record"]) for line in lines[1:]]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The journal of {self.path} is damaged ({error!r}); remove that folder to start again."
            ) from error
        if not lines:
            self._journal.truncate(0)
            self._note({"settings": self._settings})
            return
        self._journal.truncate(len(text[: text.rfind("\n") + 1].encode()))
        different = sorted(
            key for key in settings.keys() | self._settings if settings.get(key) != self._settings.get(key)
        )
        if different:
            raise CheckpointError(
                f"{self.path} holds the beginning of a conversion with another {', '.join(different)}; remove that "
                "folder to start again."
            )
        for name, size, record in files:
            if (self.path / name).is_file() and (self.path / name).stat().st_size == size:
                self.finished[name] = record
        for path in self._strays():  # temporary files that a killed process or other packages left
            path.unlink()

    def _strays(self) -> list[Path]:
        """Files that are not in the journal."""
        known = {self.path / name for name in (*self.finished, _JOURNAL)}
        return [path for path in self.path.rglob("*") if path not in known and (path.is_symlink() or not path.is_dir())]

    def _let_read(self, path: Path) -> None:
        """Give a file the usual mode; safetensors creates files that only their owner can read."""
        path.chmod(os.fstat(self._journal.fileno()).st_mode & 0o777)

    def _note(self, line: dict[str, Any]) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _disk_is_full(self, error: Exception) -> bool:
        """Whether a full disk caused the error. Writers in C++ lose the reason, so the disk's free space decides
        then."""
        if isinstance(error, CheckpointError):
            return False
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
        return "No space left" in str(error) or shutil.disk_usage(self.path).free < _FULL_DISK_BYTES


def _is_filled(path: Path) -> bool:
    """Whether something exists there other than an empty folder."""
    return path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))


def _is_alone(path: Path) -> bool:
    return len(list(path.parent.iterdir())) == 1
