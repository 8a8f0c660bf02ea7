"""StagingMeter: how many bytes a piece of code holds at one time beyond what was there before it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class StagingMeter(TorchDispatchMode):
    """Counts bytes of storages created inside it that are still alive, and their peak."""

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if not storage.nbytes() or key in self._known or key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
