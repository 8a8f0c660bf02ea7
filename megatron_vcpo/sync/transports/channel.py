"""Send weights to an engine in another process of this machine, in flat buckets in memory that both sides map.

    trainer                                               engine
    add(name, tensor): copy into the slot being filled
    slot full: ("bucket", number, handle, index)  ----->  views of the slot, one tensor at a time
    fill the other slot                                   copy them to their place
    wait before a slot is used again              <-----  number

There are two slots, so that one is filled while the other is read. The pipe carries one message a bucket: its handle
and, the first time, the index of names, dtypes and shapes. The transport decides on the kind of memory: shared memory
on a CPU (shared_memory.py), CUDA IPC on a GPU (cuda_ipc.py). Within one process no transport is needed, since the
engine reads the stream itself. For other machines see native.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_ALIGNMENT = 64  # bytes

Entry = tuple[str, torch.dtype, tuple[int, ...], int]
"""Name, dtype, shape and first byte of one tensor in a bucket."""


class WeightDelivery(Protocol):
    """Memory that two processes share, as the sending side sees it."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate `nbytes` bytes of memory that `handle` can describe to another process."""

    def handle(self, memory: torch.Tensor) -> Any:
        """What the other process needs to open the memory; small enough for a pipe."""

    def release(self, memory: torch.Tensor) -> None:
        """Free memory that the other process no longer needs."""

    def settle(self) -> None:
        """Wait until the other process can read what was written."""


class DeliveryOpener(Protocol):
    """The same memory, as the receiving side sees it."""

    def open(self, place: int, handle: Any) -> torch.Tensor:
        """Open the memory of slot `place`, closing the memory that it had before."""

    def settle(self) -> None:
        """Wait until pending copies out of the memory are done."""


class DeliveryAborted(RuntimeError):
    """The sender could not produce the rest; the message quotes the reason."""


@dataclass(slots=True)
class _Slot:
    memory: torch.Tensor
    handle: Any
    reading: int | None = None  # number of the bucket that the other side is still reading


class BucketSender:
    """Packs a stream of tensors into buckets.

    Args:
        delivery: the memory.
        post: sends one message.
        taken: waits for the number of a bucket that was read, and raises at the deadline; its argument says what is
            waited for.
        bucket_bytes: size of a slot, which grows if a tensor is larger.
    """

    def __init__(
        self,
        delivery: WeightDelivery,
        post: Callable[[tuple[Any, ...]], None],
        taken: Callable[[str], int],
        *,
        bucket_bytes: int,
    ) -> None:
        self.buckets = 0  # number of buckets sent in this update
        self._delivery = delivery
        self._post = post
        self._taken = taken
        self._bucket_bytes = bucket_bytes
        self._slots: list[_Slot | None] = [None, None]
        self._index: list[Entry] = []
        self._used = 0
        self._known: list[list[Entry]] = []  # indices that the other side remembers from the last complete update
        self._sent: list[list[Entry]] = []

    def begin(self) -> None:
        """Start an update."""
        self._index, self._sent, self._used, self.buckets = [], [], 0, 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the bucket being filled, after sending that bucket if it has no room."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if self._index and start + tensor.nbytes > self._capacity:
            self.flush()
            start = 0
        slot = self._slot(start + tensor.nbytes, name)
        _view(slot.memory, start, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
        self._index.append((name, tensor.dtype, tuple(tensor.shape), start))
        self._used = start + tensor.nbytes

    def flush(self) -> None:
        """Send the bucket being filled."""
        slot = self._slots[self.buckets % 2]
        if slot is None or not self._index:
            return
        self._delivery.settle()
        number = self.buckets
        known = number < len(self._known) and self._known[number] == self._index
        slot.reading = number
        self._post(("bucket", number, slot.handle, None if known else self._index))
        self._sent.append(self._index)
        self._index, self._used = [], 0
        self.buckets += 1

    def finish(self) -> None:
        """Send the last bucket and wait until all have been read."""
        self.flush()
        for slot in self._slots:
            if slot is not None:
                self._wait(slot, "the last tensors")
        self._known = self._sent

    def forget(self) -> None:
        """Call after a failed update: the other side reads nothing more, and may remember other indices."""
        self._known = []
        for slot in self._slots:
            if slot is not None:
                slot.reading = None

    def close(self) -> None:
        """Free the memory."""
        for slot in self._slots:
            if slot is not None:
                self._delivery.release(slot.memory)
        self._slots = [None, None]

    @property
    def _capacity(self) -> int:
        slot = self._slots[self.buckets % 2]
        return self._bucket_bytes if slot is None else max(self._bucket_bytes, slot.memory.numel())

    def _slot(self, nbytes: int, name: str) -> _Slot:
        """The slot being filled, once it is free, with room for `nbytes` more."""
        place = self.buckets % 2
        slot = self._slots[place]
        if slot is not None:
            self._wait(slot, f"what came two buckets before {name}")
        if slot is None or slot.memory.numel() < nbytes:
            if slot is not None:
                self._delivery.release(slot.memory)
            memory = self._delivery.allocate(max(nbytes, self._bucket_bytes))
            slot = self._slots[place] = _Slot(memory, self._delivery.handle(memory))
        return slot

    def _wait(self, slot: _Slot, what: str) -> None:
        while slot.reading is not None:
            number = self._taken(what)
            for other in self._slots:
                if other is not None and other.reading == number:
                    other.reading = None


def receive_buckets(
    receive: Callable[[], tuple[Any, ...]],
    acknowledge: Callable[[int], None],
    opener: DeliveryOpener,
    indices: dict[int, list[Entry]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The receiving side: yield views of the buckets' tensors. A bucket is acknowledged once the tensor after it is
    asked for.

    Args:
        receive: waits for one message.
        acknowledge: sends a bucket's number back.
        opener: opens the transport's memory.
        indices: buckets' indices, which `receive_buckets` keeps here from one update to the next.

    Raises:
        DeliveryAborted: the sender could not produce the rest.
    """
    while True:
        message = receive()
        match message:
            case ("bucket", number, handle, index):
                if index is not None:
                    indices[number] = index
                memory = opener.open(number % 2, handle)
                for name, dtype, shape, start in indices[number]:
                    yield name, _view(memory, start, dtype, shape)
                opener.settle()
                acknowledge(number)
            case ("end",):
                return
            case ("abort", reason):
                raise DeliveryAborted(reason)
            case _:
                raise DeliveryAborted(f"an unexpected message {message[0]!r} came between the buckets")


def _view(memory: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
