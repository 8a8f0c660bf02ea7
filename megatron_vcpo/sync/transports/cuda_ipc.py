"""Memory that two processes share on one GPU: CUDA IPC handles of the two buckets, not of each tensor."""

from __future__ import annotations

from typing import Any

import torch

_DEVICE_ARGUMENT = 6
"""Of torch's rebuild_cuda_tensor: the device's index in the sender. The receiver counts its devices for itself."""


class CudaIpcDelivery:
    """The sending side; see `WeightDelivery`. Sender and receiver must see the same physical device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[torch.Tensor] = []  # the receiver's mapping is valid only as long as this lives

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._memory.append(memory)
        return memory

    def handle(self, memory: torch.Tensor) -> Any:
        """(function, arguments) that rebuild the tensor in the other process."""
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(memory)

    def release(self, memory: torch.Tensor) -> None:
        """Let the memory go."""
        self._memory = [kept for kept in self._memory if kept is not memory]

    def settle(self) -> None:
        """The receiver's stream does not wait for this process's copies: they must be done."""
        torch.cuda.current_stream(self._device).synchronize()


class CudaIpcOpener:
    """The receiving side; see `DeliveryOpener`."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, torch.Tensor]] = {}

    def open(self, place: int, handle: Any) -> torch.Tensor:
        """Open each handle once."""
        rebuild, arguments = handle
        key = repr(arguments)
        if place not in self._open or self._open[place][0] != key:
            own = list(arguments)
            own[_DEVICE_ARGUMENT] = torch.cuda.current_device()
            self._open[place] = key, rebuild(*own)
        return self._open[place][1]

    def settle(self) -> None:
        """The sender may overwrite the memory as soon as it is told: copies out of it must be done."""
        torch.cuda.current_stream().synchronize()
