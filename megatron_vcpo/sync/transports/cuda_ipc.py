"""Memory that two processes share on one GPU, by CUDA IPC handles of the two buckets rather than of each tensor."""

from __future__ import annotations

from typing import Any

import torch

_DEVICE_ARGUMENT = 6
"""Position of the device index in the arguments of torch's rebuild_cuda_tensor. The receiver replaces the sender's
index by its own."""


class CudaIpcDelivery:
    """The sending side; see `WeightDelivery`. Sender and receiver must see the same physical device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[torch.Tensor] = []  # the receiver's mapping is valid only while these live

    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes of device memory."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._memory.append(memory)
        return memory

    def handle(self, memory: torch.Tensor) -> Any:
        """(function, arguments) that rebuild the tensor in the other process."""
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(memory)

    def release(self, memory: torch.Tensor) -> None:
        """Free the memory."""
        self._memory = [kept for kept in self._memory if kept is not memory]

    def settle(self) -> None:
        """Wait for this process's copies, because the receiver's stream does not."""
        torch.cuda.current_stream(self._device).synchronize()


class CudaIpcOpener:
    """The receiving side; see `DeliveryOpener`."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, torch.Tensor]] = {}

    def open(self, place: int, handle: Any) -> torch.Tensor:
        """The memory of a slot; each handle is opened only once."""
        rebuild, arguments = handle
        key = repr(arguments)
        if place not in self._open or self._open[place][0] != key:
            own = list(arguments)
            own[_DEVICE_ARGUMENT] = torch.cuda.current_device()
            self._open[place] = key, rebuild(*own)
        return self._open[place][1]

    def settle(self) -> None:
        """Wait for copies out of the memory, because the sender may overwrite it once it is told."""
        torch.cuda.current_stream().synchronize()
