"""Write a distributed checkpoint through Megatron's dist_checkpointing with one parameter in memory at a time.

Megatron's own strategy holds the whole model in memory, and PyTorch's writer every file until it is complete. This
strategy gets a sharded state dict without values, plans files of a few gigabytes, and asks for each parameter when it
is due. The format is the same: PyTorch's `.metadata`, and `.distcp` files of `torch.save`d chunks.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo  # FileSystemReader needs it; there is no public name
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_vcpo.checkpoint.convert.entries import global_sizes
from megatron_vcpo.checkpoint.partial_folder import PartialFolder

# (key, offset in the global tensor or None for an object, first byte, bytes): JSON for the journal
_Stored = tuple[str, list[int] | None, int, int]


@dataclass(frozen=True)
class Unit:
    """One parameter, whose parts are written one after the other."""

    name: str
    nbytes: int
    load: Callable[[], list[ShardedTensor]]  # returns the parts with their values


class StreamingSave(TorchDistSaveShardedStrategy):
    """A strategy for `dist_checkpointing.save` whose state dict holds tensors on the meta device.

    Args:
        folder: where the files go; finished files are not written again.
        prefix: name of the checkpoint's folder inside `folder`.
        units: every parameter, in writing order.
        shard_bytes: size at which a file is closed.
        progress: called with the bytes of each parameter written.
    """

    def __init__(
        self,
        folder: PartialFolder,
        prefix: str,
        units: Sequence[Unit],
        *,
        shard_bytes: int,
        progress: Callable[[int], object],
    ) -> None:
        super().__init__()
        self._folder, self._prefix, self._progress = folder, prefix, progress
        self.plan = {f"{prefix}/__0_{i}.distcp": part for i, part in enumerate(split(units, shard_bytes))}

    @property
    def planned_bytes(self) -> dict[str, int]:
        """File name -> bytes of the tensors in it."""
        return {name: sum(unit.nbytes for unit in units) for name, units in self.plan.items()}

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path | str) -> None:
        """Write everything; called by `dist_checkpointing.save`."""
        values = list(nested_values(sharded_state_dict))
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        objects = [value for value in values if isinstance(value, ShardedObject)]
        items = [_tensor_item(piece) for piece in tensors] + [_object_item(thing) for thing in objects]
        _, metadata = create_default_global_save_plan([SavePlan(items)])
        stored = {name: self._write(name, units) for name, units in self.plan.items()}
        name = f"{self._prefix}/__0_{len(self.plan)}.distcp"
        stored[name] = self._write_objects(name, objects)
        _MetadataWriter(checkpoint_dir).finish(metadata, [list(_results(stored))])

    def _write(self, name: str, units: Sequence[Unit]) -> list[_Stored]:
        total = sum(unit.nbytes for unit in units)
        if name in self._folder.finished:
            self._progress(total)
            return self._folder.finished[name]
        stored: list[_Stored] = []
        with self._folder.file(name) as part, part.path.open("wb") as stream:
            for unit in units:
                for piece in unit.load():
                    start = stream.tell()
                    torch.save(_compact(piece.data).view(global_sizes(piece)), stream)
                    stored.append((piece.key, list(piece.global_offset), start, stream.tell() - start))
                    piece.data = None
                self._progress(unit.nbytes)
            part.record = stored
        return stored

    def _write_objects(self, name: str, objects: Sequence[ShardedObject]) -> list[_Stored]:
        stored: list[_Stored] = []
        with self._folder.file(name) as part, part.path.open("wb") as stream:
            for thing in objects:
                data = io.BytesIO()
                torch.save([thing.data], data)
                stored.append((thing.unique_key, None, stream.tell(), stream.write(data.getbuffer())))
        return stored


class _MetadataWriter(FileSystemWriter):
    """Writes `.metadata` without a random identity, so that a resumed conversion gives the same bytes."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def split(units: Sequence[Any], shard_bytes: int) -> list[list[Any]]:
    """Consecutive groups of at most `shard_bytes` in all (by `nbytes`); a larger unit is a group of its own."""
    groups: list[list[Any]] = [[]]
    room = shard_bytes
    for unit in units:
        if groups[-1] and unit.nbytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(unit)
        room -= unit.nbytes
    return groups


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with no more storage than it needs, because torch.save writes the whole storage."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _tensor_item(piece: ShardedTensor) -> WriteItem:
    offset = torch.Size(piece.global_offset)
    return WriteItem(
        index=MetadataIndex(sys.intern(piece.key), offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(global_sizes(piece))),
            properties=TensorProperties(dtype=piece.dtype),
            size=torch.Size(piece.global_shape),
        ),
    )


def _object_item(thing: ShardedObject) -> WriteItem:
    return WriteItem(index=MetadataIndex(sys.intern(thing.unique_key)), type=WriteItemType.BYTE_IO)


def _results(stored: dict[str, list[_Stored]]) -> Iterator[WriteResult]:
    for name, things in stored.items():
        file = Path(name).name
        for key, offset, start, length in things:
            # One string object for each key, so that pickle writes it once, as in a run that was not interrupted.
            index = MetadataIndex(sys.intern(key), None if offset is None else torch.Size(offset))
            yield WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(file, start, length))
