"""The adapter to vLLM's own weight transfer: it knows the installed interface, and drives it as it is meant to be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.transports import native as deliver_native
from megatron_vcpo.sync.transports.native import NativeDelivery, http_client, nccl_init_info, probe

TENSORS = {"a.weight": torch.randn(3, 4), "b.weight": torch.randn(5).to(torch.bfloat16)}
ENTRIES = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


@pytest.fixture(scope="module")
def api() -> Any:
    return probe()


def test_the_installed_vllm_has_the_interface_that_the_adapter_knows(api: Any) -> None:
    assert api.version.startswith(deliver_native.KNOWN_VERSIONS.removeprefix("vllm "))


def test_another_interface_is_refused_by_what_is_missing(monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    monkeypatch.delattr(api.base.TrainerWeightTransferEngine, "send_weights")
    with pytest.raises(SyncError, match=r"vLLM 0\.32.* another .*TrainerWeightTransferEngine\.send_weights is missing"):
        probe()


def test_a_vllm_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliver_native, "_PACKAGE", "vllm.distributed.elsewhere")
    with pytest.raises(SyncError, match=r"elsewhere\.base .*is missing"):
        probe()


def test_nccl_gets_one_sender_the_engines_workers_and_two_buckets(api: Any) -> None:
    info = nccl_init_info(
        api, rank=1, master_address="10.0.0.1", master_port=29600, engine_workers=8, bucket_bytes=1 << 26
    )
    assert (info.backend, info.world_size, info.is_sender) == ("nccl", 9, False)
    assert (info.packed, info.packed_buffer_size_bytes, info.packed_num_buffers) == (True, 1 << 26, 2)
    assert http_client(api, "http://engine:8000/", timeout=5.0).timeout == 5.0


def loopback(api: Any, log: list[Any]) -> Any:
    """A transport of vLLM's kind that hands its tensors to a list, and its init info."""

    @dataclass
    class Info(api.base.TrainerInitInfo):
        backend: ClassVar[str] = f"loopback {id(log)}"

    class Loopback(api.base.TrainerWeightTransferEngine):
        init_info_cls = Info

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
            client.init_weight_transfer_engine({"rank": init_info.rank})
            return cls(client=client, source=source, is_sender=init_info.is_sender)

        def send_weights(self) -> None:
            self.client.start_weight_update()
            expected = self.source.metadata()
            for number, (name, tensor) in enumerate(self.source):
                meta = expected[number]
                assert (meta.name, meta.dtype, meta.shape) == (name, tensor.dtype, tuple(tensor.shape))
                log.append((name, tensor.clone()))
                if self.source.stop_after == number + 1:
                    return
            self.client.finish_weight_update()

    api.factory.WeightTransferTrainerFactory.register_engine(Info.backend, Loopback)
    return Info(rank=0)


class Client:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append(name)


def stream() -> Iterator[tuple[str, torch.Tensor]]:
    yield from TENSORS.items()


def test_every_set_is_sent_whole_between_start_and_finish(api: Any) -> None:
    log: list[Any] = []
    client = Client()
    delivery = NativeDelivery(ENTRIES, loopback(api, log), client, api)
    delivery._source.stop_after = None
    for version in (3, 4):
        assert delivery.update_weights(stream(), version).reloaded == 2
        assert delivery.version == version
    assert [name for name, _ in log] == [*TENSORS, *TENSORS]
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in log)
    assert client.calls == [
        "init_weight_transfer_engine",
        *["start_weight_update", "finish_weight_update"] * 2,
    ]
    delivery._source.stop_after = 1
    with pytest.raises(SyncError, match=r"stopped reading before b\.weight"):
        delivery.update_weights(stream(), 5)
    assert delivery.version is None
