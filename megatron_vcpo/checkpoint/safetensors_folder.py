"""SafetensorsFolder: the tensors of a Hugging Face checkpoint, read lazily from one or more files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_vcpo.models.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsFolder:
    """Names, shapes and slices of a checkpoint's tensors; only headers are read until a slice is indexed.

    Raises:
        CheckpointError: no such folder, no safetensors files, a truncated or missing file, a tensor in two files, or
            another model beside the sharded one.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}
        self._place: dict[str, Path] = {}
        for path, listed in self._listing().items():
            handle = self._open(path)
            for name in listed if listed is not None else handle.keys():
                self._place[name] = path
            self._check(path, listed)

    def names(self) -> set[str]:
        """Names of all tensors of the checkpoint."""
        return set(self._place)

    def slice(self, name: str) -> Any:
        """A lazy tensor; indexing it reads just that part of the file."""
        return self._open(self._place[name]).get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, from the header."""
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype in safetensors' spelling: 'BF16', 'I8', 'F8_E4M3'."""
        return str(self.slice(name).get_dtype())

    def is_float(self, name: str) -> bool:
        """Whether the tensor is stored as plain floating point (not quantized)."""
        return self.dtype(name) in _FLOAT_TYPES

    def release(self) -> None:
        """Close the files, whose mapped pages count as this process's memory. The next read opens what it needs."""
        self._files.clear()

    def _listing(self) -> dict[Path, list[str] | None]:
        """The checkpoint's files, each with the tensors that the index lists for it (None: no index)."""
        if not self.folder.is_dir():
            raise CheckpointError(f"There is no checkpoint folder {self.folder}.")
        index = self.folder / _INDEX
        if not index.is_file():
            single = self.folder / _SINGLE
            if not single.is_file():
                raise CheckpointError(
                    f"{self.folder} holds neither {_SINGLE} nor {_INDEX}; save the model with "
                    "save_pretrained(..., safe_serialization=True)."
                )
            return {single: None}
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"])
            if not all(isinstance(file, str) for file in weight_map.values()):
                raise TypeError("the place of a tensor is no file name")
            if not weight_map:
                raise ValueError("it names no tensor")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}.") from error
        files: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            listed = files.setdefault(self.folder / file, [])
            assert listed is not None
            listed.append(name)
        stale = self.folder / _SINGLE
        if stale.is_file() and stale not in files:
            raise CheckpointError(
                f"{self.folder} holds two models: {_SINGLE}, which transformers reads, and the shards that {_INDEX} "
                "names; remove the one that is stale."
            )
        return files

    def _open(self, path: Path) -> Any:
        key = str(path)
        if key not in self._files:
            try:
                self._files[key] = safe_open(key, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(f"{path} is named by {_INDEX} but does not exist.") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is not a complete safetensors file ({error}); copy or download it again."
                ) from error
        return self._files[key]

    def _check(self, path: Path, listed: list[str] | None) -> None:
        """Check that the index and the file's header name the same tensors."""
        if listed is None:
            return
        difference = set(self._open(path).keys()) ^ set(listed)
        if difference:
            raise CheckpointError(
                f"{path} and {_INDEX} disagree about {', '.join(sorted(difference))}; save the checkpoint again."
            )
