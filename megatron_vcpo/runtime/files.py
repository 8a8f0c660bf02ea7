"""Files that are there as a whole or not at all, whatever ends the process or the machine that writes them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to; it becomes `path` when the body ends and its bytes are on the disk.

    One process at a time: the name is always `path` with `.tmp` behind it. After an error it is removed, and `path` is
    what it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a small file as a whole."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)):  # some file systems know no such
            raise
    finally:
        os.close(descriptor)


def unused_name(path: Path) -> Path:
    """What to call an earlier file of that name: name.1.suffix, or the next free number."""
    number = 1
    while (candidate := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return candidate


def cut_file(path: Path, *, kept: bytes, cut: bytes) -> None:
    """Leave `kept` in a file; `cut`, where there is any, goes to name.cut.1.suffix, or the next free number, first."""
    if cut:
        replace_bytes(unused_name(path.with_suffix(f".cut{path.suffix}")), cut)
    if kept != path.read_bytes():
        replace_bytes(path, kept)
