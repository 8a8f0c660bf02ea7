"""torch.distributed.checkpoint unpickles whatever a checkpoint holds: `.metadata`, and the objects in `.distcp` files.

A pickle can name any function and have it called, so a checkpoint from a stranger runs the stranger's code before a
single tensor is read. With this patch, `.metadata` may name only the classes that describe a checkpoint, and objects
are read with `weights_only=True` and the classes that Megatron-Core registers for its own files (Megatron reads
`common.pt` that way already).

Versions: torch 2.13.0 (`FileSystemReader.read_metadata` calls pickle.load, `DefaultLoadPlanner.load_bytes` calls
torch.load with weights_only=False), megatron-core 0.19.2. For every device. No longer needed when the tests of stock
torch in `tests/patches/test_checkpoint_unpickling.py` fail.
"""

from __future__ import annotations

import functools
import io
import pickle
from pathlib import PurePosixPath
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    # Megatron stores the ranks' plans with the metadata.
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    # Up to torch 2.2 the properties were defined here.
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "frozenset", "list", "set", "tuple"},
}


class UnreadableCheckpoint(pickle.UnpicklingError):
    """A file that is damaged, or that names more than a checkpoint needs; the message, one sentence, names it."""


class MetadataUnpickler(pickle.Unpickler):
    """Reads `.metadata`; raises UnpicklingError if it names a function or any other class."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is allowed."""
        if name in _METADATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def apply() -> None:
    """Restrict what a checkpoint's files may name. Idempotent."""
    if hasattr(FileSystemReader.read_metadata, "__wrapped__"):
        return
    import megatron.core  # noqa: F401 - registers the classes that its files hold

    FileSystemReader.read_metadata = _restricted(FileSystemReader.read_metadata)
    DefaultLoadPlanner.load_bytes = functools.wraps(DefaultLoadPlanner.load_bytes)(_load_bytes)


def _restricted(stock: Any) -> Any:
    @functools.wraps(stock)
    def read_metadata(self: Any, *args: Any, **kwargs: Any) -> Metadata:
        rank, whole = kwargs.get("rank"), self._get_metadata_path(None)
        if rank is not None and self.fs.exists(whole):
            # torch asks for one rank's metadata if it could not read the common one.
            raise UnreadableCheckpoint(f"The checkpoint file {whole} is there and cannot be read.")
        path = self._get_metadata_path(rank)
        with self.fs.create_stream(path, "rb") as file:
            data = file.read()
        try:
            metadata = MetadataUnpickler(io.BytesIO(data)).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
            _require_inside(metadata)
        # Damaged pickles raise errors of nearly every kind, also from the classes that they build.
        except Exception as error:
            raise UnreadableCheckpoint(
                f"The checkpoint file {path} cannot be read ({type(error).__name__}: {error}): it is damaged, or made "
                "to run code where it is loaded; copy the checkpoint again or take another one."
            ) from error
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        cast(StorageMeta, metadata.storage_meta).load_id = self.load_id
        return metadata

    return read_metadata


def _require_inside(metadata: Metadata) -> None:
    """Check that every file named lies in the checkpoint's folder."""
    for info in (metadata.storage_data or {}).values():
        path = PurePosixPath(info.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise pickle.UnpicklingError(f"it names the file {str(path)!r}, which lies outside")


def _load_bytes(self: Any, read_item: ReadItem, value: io.BytesIO) -> None:
    name = read_item.dest_index.fqn
    try:
        loaded = torch.load(value, weights_only=True)
    except Exception as error:  # as above
        said = str(error).strip().partition("\n")[0]
        raise UnreadableCheckpoint(
            f"The object {name} of the checkpoint cannot be read ({type(error).__name__}: {said}): its file is "
            "damaged, or made to run code where it is loaded; copy the checkpoint again or take another one."
        ) from error
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded
