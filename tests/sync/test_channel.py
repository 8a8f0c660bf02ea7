"""Buckets between two processes, with both sides in one: what arrives, how many messages, and when memory is reused."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from typing import Any

import pytest
import torch

from megatron_vcpo.sync.transports.channel import BucketSender, DeliveryAborted, receive_buckets
from megatron_vcpo.sync.transports.shared_memory import SharedMemoryDelivery, SharedMemoryOpener

TENSORS = {
    "a": torch.randn(3, 5),
    "scalar": torch.tensor(2.5),
    "half": torch.randn(7).to(torch.bfloat16),
    "large": torch.randn(40, 10),
    "b": torch.arange(11),
    "empty": torch.empty(0, 4),
    **{f"n{i}": torch.randn(i + 1) for i in range(20)},
}


class TwoSides:
    """A sender here and a receiver in a thread that keeps copies of what it reads."""

    def __init__(self, bucket_bytes: int) -> None:
        self.posted: list[tuple[Any, ...]] = []
        self.received: list[tuple[str, torch.Tensor]] = []
        self.failure: Exception | None = None
        self._messages: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._taken: queue.Queue[int] = queue.Queue()
        self._opener = SharedMemoryOpener()
        self._indices: dict[int, Any] = {}
        self.sender = BucketSender(
            SharedMemoryDelivery(), self._post, lambda what: self._taken.get(timeout=60), bucket_bytes=bucket_bytes
        )

    def _post(self, message: tuple[Any, ...]) -> None:
        self.posted.append(message)
        self._messages.put(message)

    def _receive(self) -> None:
        try:
            for name, view in receive_buckets(self._messages.get, self._taken.put, self._opener, self._indices):
                self.received.append((name, view.clone()))
        except DeliveryAborted as error:
            self.failure = error

    def update(self, tensors: dict[str, torch.Tensor], *, abort_after: int | None = None) -> None:
        self.posted, self.received, self.failure = [], [], None
        thread = threading.Thread(target=self._receive)
        thread.start()
        self.sender.begin()
        memory = torch.empty(1 << 12, dtype=torch.uint8)
        for number, (name, tensor) in enumerate(tensors.items()):
            if number == abort_after:
                self._messages.put(("abort", "no more"))
                break
            view = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self.sender.add(name, view)
            memory.fill_(99)  # the producer reuses its memory at once
        else:
            self.sender.finish()
            self._messages.put(("end",))
        thread.join(timeout=60)
        assert not thread.is_alive()
        while not self._taken.empty():  # the engine's last answer comes after all of these
            self._taken.get()


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 16])
def test_everything_arrives_as_it_was_in_order_whatever_the_size_of_a_bucket(bucket_bytes: int) -> None:
    sides = TwoSides(bucket_bytes)
    for _ in range(3):
        sides.update(TENSORS)
        assert [name for name, _ in sides.received] == list(TENSORS)
        for name, tensor in sides.received:
            assert tensor.dtype == TENSORS[name].dtype
            assert torch.equal(tensor, TENSORS[name])


def test_one_message_a_bucket_and_the_index_only_the_first_time() -> None:
    sides = TwoSides(300)
    sides.update(TENSORS)
    first = sides.posted
    assert 3 < len(first) == sides.sender.buckets < len(TENSORS)
    assert all(index for *_, index in first)
    sides.update(TENSORS)
    assert len(sides.posted) == len(first)
    assert all(index is None for *_, index in sides.posted)
    changed = TENSORS | {"b": torch.arange(12)}
    sides.update(changed)
    assert [name for name, _ in sides.received] == list(changed)
    assert sum(index is not None for *_, index in sides.posted) == 1


def test_an_update_that_was_broken_off_leaves_no_wrong_index_behind() -> None:
    sides = TwoSides(300)
    sides.update(TENSORS)
    reordered = dict(reversed(TENSORS.items()))
    sides.update(reordered, abort_after=20)
    assert "no more" in str(sides.failure)
    sides.sender.forget()
    sides.update(TENSORS)
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in sides.received)


def test_two_slots_are_all_the_memory_there_is() -> None:
    sides = TwoSides(300)
    sides.update(TENSORS)
    handles = {handle for _, _, handle, _ in sides.posted}
    assert len(handles) <= 3  # the large tensor made one slot grow
    sides.update(TENSORS)
    assert len({handle for _, _, handle, _ in sides.posted}) <= 2
    sides.sender.close()


def test_a_slot_is_not_written_again_before_it_was_given_back() -> None:
    posted: list[tuple[Any, ...]] = []
    waited: list[str] = []

    def taken(what: str) -> int:
        waited.append(what)
        return len(waited) - 1

    sender = BucketSender(SharedMemoryDelivery(), posted.append, taken, bucket_bytes=64)
    sender.begin()
    for number in range(2):
        sender.add(f"t{number}", torch.full((16,), float(number)))
    sender.flush()
    assert [message[1] for message in posted] == [0, 1]
    assert not waited
    sender.add("t2", torch.zeros(16))
    assert len(waited) == 1
    assert "t2" in waited[0]


def test_a_bucket_is_given_back_only_when_what_comes_after_it_is_asked_for() -> None:
    delivery = SharedMemoryDelivery()
    memory = delivery.allocate(64)
    index = [("x", torch.uint8, (8,), 0), ("y", torch.uint8, (8,), 8)]
    messages = [("end",), ("bucket", 0, delivery.handle(memory), index)]
    given_back: list[int] = []
    stream = receive_buckets(messages.pop, given_back.append, SharedMemoryOpener(), {})
    assert next(stream)[0] == "x"
    assert next(stream)[0] == "y"
    assert given_back == []
    assert next(stream, None) is None
    assert given_back == [0]


def _read_in_child(connection: Any) -> None:
    handle = connection.recv()
    memory = SharedMemoryOpener().open(0, handle)
    connection.send(memory.sum().item())
    memory.fill_(7)
    connection.send("done")


def test_another_process_sees_the_memory_and_nothing_is_left_of_it() -> None:
    before = set(os.listdir("/dev/shm"))
    delivery = SharedMemoryDelivery()
    memory = delivery.allocate(1000)
    memory.fill_(3)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(there,))
    child.start()
    here.send(delivery.handle(memory))
    assert here.recv() == 3000
    assert here.recv() == "done"
    child.join(10)
    assert memory.sum() == 7000
    delivery.release(memory)
    assert set(os.listdir("/dev/shm")) - before == set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a CUDA device")
def test_cuda_memory_is_opened_in_another_process() -> None:
    from megatron_vcpo.sync.transports.cuda_ipc import CudaIpcDelivery

    delivery = CudaIpcDelivery(torch.device("cuda"))
    memory = delivery.allocate(1 << 20)
    memory.fill_(3)
    delivery.settle()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_read_cuda_in_child, args=(there,))
    child.start()
    here.send(delivery.handle(memory))
    assert here.recv() == 3 << 20
    child.join(60)


def _read_cuda_in_child(connection: Any) -> None:
    from megatron_vcpo.sync.transports.cuda_ipc import CudaIpcOpener

    connection.send(int(CudaIpcOpener().open(0, connection.recv()).sum(dtype=torch.int64)))
