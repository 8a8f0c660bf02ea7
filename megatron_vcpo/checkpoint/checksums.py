"""Checksums of a checkpoint's files, written after a save and compared before anything is loaded.

torch.distributed.checkpoint does not check tensors for damage, so training would go on with a flipped byte. The file
`vcpo_checksums.json` in an iteration's folder lists every other file there with its size in bytes and its CRC-32, and
holds a CRC-32 of the list itself. This finds accidental damage, not tampering (docs/security.md).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch.distributed as dist

from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.runtime.agreement import raise_together
from megatron_vcpo.runtime.files import replace_bytes

MANIFEST = "vcpo_checksums.json"
ROLLOUT_STATE = "train_dataloader_dprank"  # prefix of the names of these files
_VERSION = 1
_BLOCK = 4 << 20  # bytes per read
_THREADS = 4  # zlib releases the GIL
_WRITTEN_BY = re.compile(r"__(\d+)_\d+\.distcp")  # torch names a file after the rank that writes it


@dataclass(frozen=True, slots=True)
class FileSum:
    """The listed size and checksum of one file."""

    size: int  # bytes
    crc: str  # CRC-32, eight hexadecimal digits


def file_sum(path: Path) -> FileSum:
    """Size and CRC-32 of a file; reads all of it."""
    crc, size = 0, 0
    with path.open("rb", buffering=0) as file:
        block = bytearray(_BLOCK)
        while count := file.readinto(block):
            crc = zlib.crc32(memoryview(block)[:count], crc)
            size += count
    return FileSum(size, f"{crc:08x}")


def write(folder: Path) -> None:
    """Hash the files of a finished save and list them; collective over all processes if there are several.

    Each rank reads back what it wrote, which its machine still has cached in memory; rank 0 also reads files of no
    particular rank. The list is renamed into place once it is on disk, so that a killed save leaves no partial list.

    Raises:
        CheckpointError: on every rank; a file cannot be read, or the list cannot be written.
    """
    rank, world = _place()
    names = [name for name in _names(folder) if _writer(name) % world == rank]
    sums: dict[str, FileSum] = {}
    failure: CheckpointError | None = None
    try:
        sums = dict(zip(names, _parallel(file_sum, [folder / name for name in names]), strict=True))
    except OSError as error:
        failure = CheckpointError(f"The checksums of {folder} cannot be made ({error}); the save is not complete.")
    raise_together(failure)
    parts = [sums]
    if world > 1:
        parts = [{} for _ in range(world)]
        dist.all_gather_object(parts, sums)
    if rank == 0:
        try:
            _write_list(folder / MANIFEST, {name: each for part in parts for name, each in part.items()})
        except OSError as error:
            failure = CheckpointError(f"{folder / MANIFEST} cannot be written ({error.strerror}).")
            failure.__cause__ = error  # launch/ explains a full disk in its own sentence
    raise_together(failure)


def remove(folder: Path) -> None:
    """Remove the list that an earlier save into the same folder wrote. Call it in one process only."""
    (folder / MANIFEST).unlink(missing_ok=True)


def check_sizes(folder: Path, *, rollout_state: bool = True) -> None:
    """Check that every listed file exists with its listed size: quick, and finds partial copies.

    Args:
        folder: of one iteration; passes if it has no list.
        rollout_state: whether to check the files of the flow's state too.

    Raises:
        CheckpointError: names the first file that is missing or has another size, or the list if that is damaged.
    """
    for name, saved in _read_list(folder).items():
        if rollout_state or not _is_rollout_state(name):
            _check_size(folder / name, saved)


def verify(folder: Path, *, rollout_state: bool = True) -> bool:
    """Compare every file with its checksum; collective over all processes, among which the bytes are divided.

    Args:
        folder: of one iteration.
        rollout_state: whether to check the files of the flow's state too.

    Returns:
        Whether there was a list to compare with; other programs' checkpoints have none.

    Raises:
        CheckpointError: on every rank; names the first file that is damaged.
    """
    failure: CheckpointError | None = None
    listed: dict[str, FileSum] = {}
    try:
        listed = {
            name: saved for name, saved in _read_list(folder).items() if rollout_state or not _is_rollout_state(name)
        }
        for name, saved in listed.items():
            _check_size(folder / name, saved)
        mine = _share(listed, *_place())
        for name, found in zip(mine, _parallel(file_sum, [folder / name for name in mine]), strict=True):
            if found != listed[name]:
                raise _damaged(
                    folder / name,
                    f"is damaged: its checksum is {found.crc}, and {listed[name].crc} was noted when it was saved",
                )
    except OSError as error:
        failure = CheckpointError(f"{folder} cannot be read to compare its checksums ({error}).")
    except CheckpointError as error:
        failure = error
    raise_together(failure)
    return bool(listed)


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _names(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found if path != folder / MANIFEST)


def _writer(name: str) -> int:
    match = _WRITTEN_BY.fullmatch(name)
    return int(match[1]) if match else 0


def _share(listed: dict[str, FileSum], rank: int, world: int) -> list[str]:
    """The files that one rank reads. Largest first, each goes to the rank with the fewest bytes so far."""
    loads, mine = [0] * world, []
    for name in sorted(listed, key=lambda each: (-listed[each].size, each)):
        least = min(range(world), key=lambda each: loads[each])
        loads[least] += listed[name].size
        if least == rank:
            mine.append(name)
    return mine


def _parallel(read: Callable[[Path], FileSum], paths: Iterable[Path]) -> list[FileSum]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(read, paths))


def _is_rollout_state(name: str) -> bool:
    return PurePosixPath(name).name.startswith(ROLLOUT_STATE)


def _check_size(path: Path, saved: FileSum) -> None:
    if not path.is_file():
        raise _damaged(path, "is missing")
    if (size := path.stat().st_size) != saved.size:
        raise _damaged(path, f"has {size} bytes of {saved.size}")


def _damaged(path: Path, how: str) -> CheckpointError:
    anew = ", or add --finetune to start a new run from its weights" if _is_rollout_state(path.name) else ""
    return CheckpointError(
        f"{path} {how}; copy the checkpoint again, or take an earlier one (--ckpt-step in training, --step in the "
        f"tools){anew}."
    )


def _list_crc(files: dict[str, list[int | str]]) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"


def _write_list(path: Path, sums: dict[str, FileSum]) -> None:
    files: dict[str, list[int | str]] = {name: [each.size, each.crc] for name, each in sorted(sums.items())}
    content = {"version": _VERSION, "algorithm": "crc32", "list": _list_crc(files), "files": files}
    replace_bytes(path, json.dumps(content, indent=1).encode())


def _read_list(folder: Path) -> dict[str, FileSum]:
    """Name -> size and checksum; empty if there is no list."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
        files = content["files"]
        whole = content["version"] == _VERSION and content["list"] == _list_crc(files)
        sums = {str(name): FileSum(int(size), str(crc)) for name, (size, crc) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, "is damaged: it is no list of checksums") from error
    if not whole:
        raise _damaged(path, "is damaged: the list does not have the checksum that it carries")
    for name in sums:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise _damaged(path, f"is damaged: it names {name!r}, which lies outside of the folder")
    return sums
