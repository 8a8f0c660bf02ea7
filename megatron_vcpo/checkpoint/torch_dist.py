"""TorchDistFolder: the tensors of a checkpoint that Megatron's training saved, read one region at a time."""

from __future__ import annotations

import argparse
import json
import pickle
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_vcpo.checkpoint.checksums import verify
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.patches import checkpoint_unpickling
from megatron_vcpo.patches.checkpoint_unpickling import UnreadableCheckpoint

TRACKER = "latest_checkpointed_iteration.txt"
# What PyTorch raises for files that are truncated or hold something else; pickle has no specific error for most cases.
_DAMAGED = (OSError, RuntimeError, EOFError, AssertionError, LookupError, TypeError, ValueError, pickle.UnpicklingError)


class TorchDistFolder:
    """A checkpoint in Megatron's torch_dist format, read independently of the layout that saved it.

    Args:
        folder: the folder given to --save, or that of one iteration in it.
        step: the iteration; default: the latest.

    Raises:
        CheckpointError: no checkpoint, another format, an incomplete or damaged one, or one whose pickles name objects
            that no checkpoint needs.
    """

    def __init__(self, folder: str | Path, step: int | None = None) -> None:
        checkpoint_unpickling.apply()
        self.path = locate(Path(folder), step)
        verify(self.path, rollout_state=False)
        self._reader = FileSystemReader(self.path)
        try:
            metadata = self._reader.read_metadata()
        except UnreadableCheckpoint as error:
            raise CheckpointError(str(error)) from error
        except (*_DAMAGED, AttributeError, ImportError) as error:
            raise CheckpointError(f"{self.path / '.metadata'} cannot be read ({error}).") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self.tensors = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self._chunks: dict[str, tuple[int, dict[tuple[int, ...], list[ChunkStorageMetadata]]]] = {}
        self._require_files(metadata)

    def common(self) -> dict[str, Any]:
        """What is stored besides tensors: arguments, iteration, version of the content."""
        from megatron.core.dist_checkpointing import load_common_state_dict
        from megatron.core.dist_checkpointing.core import CheckpointingException

        try:
            state = load_common_state_dict(self.path)
        except CheckpointException as error:  # holds each rank's error
            reason: BaseException = next((failure for failure, _ in error.failures.values()), error)
            raise CheckpointError(f"The arguments in {self.path} cannot be read ({reason}).") from error
        except (*_DAMAGED, AttributeError, ImportError, CheckpointingException) as error:
            raise CheckpointError(f"The arguments in {self.path} cannot be read ({error}).") from error
        if not isinstance(state.get("args"), argparse.Namespace):
            raise CheckpointError(f"{self.path} holds no arguments, so that its model is unknown.")
        return state

    def read(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A region of a global tensor, in its stored dtype.

        Raises:
            CheckpointError: the region is not stored exactly once, or its file is damaged.
        """
        stored = self.tensors[key]
        wanted = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(sizes))
        nearby = TensorStorageMetadata(stored.properties, stored.size, self._near(key, wanted))
        items = create_read_items_for_chunk_list(key, nearby, [wanted])
        target = torch.empty(tuple(sizes), dtype=stored.properties.dtype)
        found = sum(item.lengths.numel() for item in items)
        if found != target.numel():
            raise CheckpointError(
                f"{self.path} holds {found} of the {target.numel()} values of {key} at {tuple(offset)}; "
                "was it saved by another model?"
            )
        try:
            self._reader.read_data(LoadPlan(items), _Into(target))
        except _DAMAGED as error:
            raise CheckpointError(f"{key} cannot be read from {self.path}: {error}.") from error
        return target

    def _near(self, key: str, wanted: ChunkStorageMetadata) -> list[ChunkStorageMetadata]:
        """Stored chunks that may overlap the region; not all chunks, since there may be thousands of experts."""
        if key not in self._chunks:
            chunks = self.tensors[key].chunks
            axes = 0  # leading axes along which every chunk has size 1: layers, experts
            while axes < len(wanted.sizes) and all(chunk.sizes[axes] == 1 for chunk in chunks):
                axes += 1
            index: dict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
            for chunk in chunks:
                index[tuple(chunk.offsets[:axes])].append(chunk)
            self._chunks[key] = axes, index
        axes, index = self._chunks[key]
        if all(size == 1 for size in wanted.sizes[:axes]):
            return index.get(tuple(wanted.offsets[:axes]), [])
        return self.tensors[key].chunks

    def _require_files(self, metadata: Any) -> None:
        """Check that every file exists with the size that the metadata implies, rather than fail halfway."""
        ends: dict[str, int] = defaultdict(int)
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        for name, end in ends.items():
            path = self.path / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; copy the checkpoint again.")
            if path.stat().st_size < end:
                raise CheckpointError(f"{path} has {path.stat().st_size} bytes of {end}; copy the checkpoint again.")


class _Into(DefaultLoadPlanner):
    """A load planner that reads into one given tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


def is_megatron(folder: str | Path) -> bool:
    """Whether a folder looks like a Megatron checkpoint: one iteration, or the folder of a run."""
    return (Path(folder) / TRACKER).exists() or (Path(folder) / ".metadata").exists()


def locate(folder: Path, step: int | None = None) -> Path:
    """The folder of one iteration (or `release`); CheckpointError if there is none in torch_dist format."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {folder}.")
    path = folder
    if (folder / "metadata.json").is_file():
        if step is not None and folder.absolute().name != f"iter_{step:07d}":
            raise CheckpointError(f"{folder} is the folder of one iteration, and not of {step}; drop --step.")
    else:
        tracker = folder / TRACKER
        if not tracker.is_file():
            raise CheckpointError(f"{folder} is no Megatron checkpoint: it holds neither {TRACKER} nor metadata.json.")
        name = str(step) if step is not None else tracker.read_text(encoding="ascii", errors="replace").strip()
        if name != "release" and not name.isdecimal():
            raise CheckpointError(f"{tracker} holds {name[:40]!r} and not the number of an iteration.")
        path = folder / (name if name == "release" else f"iter_{int(name):07d}")
        if not path.is_dir():
            raise CheckpointError(f"{path} is missing; choose an iteration that is there with --step.")
    if not (path / "metadata.json").is_file() or not (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path} is not a complete checkpoint in the torch_dist format (--ckpt-format torch_dist); the legacy "
            "formats are not read."
        )
    _check_format(path / "metadata.json")
    return path


def _check_format(path: Path) -> None:
    """Raise CheckpointError unless metadata.json says that the format is torch_dist."""
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); copy the checkpoint again.") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{path.parent} is in the format {backend!r}; only torch_dist is read.")
