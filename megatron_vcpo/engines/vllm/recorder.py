"""CopyRecorder: watches vLLM load one set of weights and records where each tensor's elements end up.

vLLM's loader copies a checkpoint's tensor, or a tensor-parallel rank's part of it, into a part of a fresh parameter
(the k rows of a fused qkv), and that parameter into the storage that its kernels use. The recorder sees both copies.
Its record must be checked against the bits (`Write.digest`) before anyone relies on it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vcpo.data.digests import digest


@dataclass(frozen=True, slots=True)
class Region:
    """A view of a storage: elements `offset + i * stride`."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Region:
        """The region of its storage that `tensor` views."""
        return Region(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """The same region of `base`'s storage, relative to where `base` begins."""
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.size:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Write:
    """A copy of a part of a checkpoint's tensor into a part of an engine parameter."""

    name: str  # of the checkpoint's tensor
    source: Region  # in the contiguous tensor
    target: Region  # in the parameter
    digest: int  # of the values written, in the parameter's dtype


@dataclass(slots=True)
class Written:
    """How the loader filled an engine parameter."""

    module: str  # its module's name in the model
    parameter: str  # its name in the module
    shape: tuple[int, ...]  # when loaded; a kernel may change it afterwards
    dtype: torch.dtype
    writes: dict[tuple[str, Region, Region], Write]
    landed: bool = False  # copied unchanged into the storage that the kernels read


class CopyRecorder(TorchDispatchMode):
    """A context for the load. Call `expect` for each tensor handed to the loader, each with its own storage."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the tensors that arrived
        self.written: list[Written] = []
        self._modules = list(model.named_modules())
        self._sources: dict[int, str] = {}
        self._targets: dict[int, Written] = {}

    def expect(self, name: str, tensor: torch.Tensor) -> None:
        """Announce that the checkpoint's tensor `name` is about to be handed over."""
        self.shapes[name] = tuple(tensor.shape)
        self._remember(self._sources, tensor, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and not args[0].is_meta and not args[1].is_meta:
            self._note(args[0], args[1])
        return result

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._sources.get(_address(source))
        known = self._targets.get(_address(source))
        if name is not None:
            written = self._targets.get(_address(target)) or self._new_target(target)
            if written is not None:
                write = Write(name, Region.of(source), Region.of(target), digest(source.to(target.dtype)))
                written.writes[write.name, write.source, write.target] = write
        elif known is not None and _is_whole(target) and _is_whole(source) and target.shape == source.shape:
            known.landed = target.dtype == source.dtype

    def _new_target(self, target: torch.Tensor) -> Written | None:
        """The model's parameter that `target` is a part of; None if it belongs to none."""
        for module_name, module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.is_meta or _address(parameter) != _address(target):
                    continue
                written = Written(module_name, name, tuple(parameter.shape), parameter.dtype, {})
                self.written.append(written)
                self._remember(self._targets, target, written)
                return written
        return None

    @staticmethod
    def _remember(table: dict[int, Any], tensor: torch.Tensor, value: Any) -> None:
        """Store `value` under the storage's address while the storage lives: another may get the address later."""
        storage = tensor.untyped_storage()
        table[storage.data_ptr()] = value
        weakref.finalize(storage, table.pop, storage.data_ptr(), None)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or -1  # empty tensors have none


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
