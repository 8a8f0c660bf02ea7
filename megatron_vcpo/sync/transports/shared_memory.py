"""Memory that two processes of one machine share, on a CPU: anonymous files, mapped by both.

The files have no name in any file system, so nothing is left behind however the processes end, and the size of /dev/shm
(64 MB in many containers) is no limit.
"""

from __future__ import annotations

import os
from typing import Any

import torch


class SharedMemoryDelivery:
    """The sending side; see `WeightDelivery`."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # address -> file descriptor

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Mapped memory, whose pages are allocated when first written."""
        file = os.memfd_create("megatron_vcpo_weights", os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
        memory = _map(os.getpid(), file, nbytes)
        self._files[memory.data_ptr()] = file
        return memory

    def handle(self, memory: torch.Tensor) -> tuple[int, int, int]:
        """(process, file descriptor in it, bytes)."""
        return os.getpid(), self._files[memory.data_ptr()], memory.numel()

    def release(self, memory: torch.Tensor) -> None:
        """Close the file; the memory is freed with its last mapping."""
        os.close(self._files.pop(memory.data_ptr()))

    def settle(self) -> None:
        """Nothing to wait for: the other process sees what was written at once."""


class SharedMemoryOpener:
    """The receiving side; see `DeliveryOpener`."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Any, torch.Tensor]] = {}

    def open(self, place: int, handle: tuple[int, int, int]) -> torch.Tensor:
        """The memory of a slot; each handle is mapped only once."""
        if place not in self._open or self._open[place][0] != handle:
            self._open[place] = handle, _map(*handle)
        return self._open[place][1]

    def settle(self) -> None:
        """Nothing to wait for: copies on a CPU are synchronous."""


def _map(process: int, file: int, nbytes: int) -> torch.Tensor:
    return torch.from_file(f"/proc/{process}/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8)
