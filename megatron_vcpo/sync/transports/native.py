"""vLLM's own weight transfer, for engines that are servers on other machines (NCCL), behind one thin adapter.

The interface is young and has changed between releases, so `probe` first checks whether the installed one fits. vLLM
broadcasts packed buffers, loads them on the other side with its own reload, and drives the handshake (start, update,
finish) through a client: a vLLM server's HTTP routes, or anything with the same four methods.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.receiver import UpdateReport

KNOWN_VERSIONS = "vllm 0.32"
_PACKAGE = "vllm.distributed.weight_transfer"
_NEEDED = {
    "base": ("WeightSource.metadata", "ParamMeta", "TrainerWeightTransferEngine.send_weights"),
    "factory": ("WeightTransferTrainerFactory.trainer_init",),
    "clients": ("HTTPVLLMWeightSyncClient.start_weight_update",),
    "nccl_engine": ("NCCLTrainerInitInfo", "NCCLTrainerWeightTransferEngine.trainer_init"),
}

TensorEntry = tuple[str, torch.dtype, tuple[int, ...]]
"""Hugging Face name, type and full shape of one tensor of a stream."""


@dataclass(frozen=True, slots=True)
class NativeApi:
    """vLLM's modules that `probe` found."""

    version: str
    base: Any
    factory: Any
    clients: Any
    nccl_engine: Any


def probe() -> NativeApi:
    """Find the interface in the installed vLLM; SyncError says what is missing."""
    try:
        import vllm
    except ImportError as error:
        raise SyncError(
            "vLLM's weight transfer needs vLLM in the trainer's environment; it is not installed."
        ) from error
    version = str(vllm.__version__)
    modules: dict[str, Any] = {}
    missing: list[str] = []
    for name, needed in _NEEDED.items():
        try:
            modules[name] = importlib.import_module(f"{_PACKAGE}.{name}")
        except ImportError as error:
            missing.append(f"{_PACKAGE}.{name} ({error})")
            continue
        missing += [f"{_PACKAGE}.{name}.{path}" for path in needed if not _has(modules[name], path)]
    if missing:
        raise SyncError(
            f"vLLM {version} has another weight-transfer interface than {KNOWN_VERSIONS}, which this version knows: "
            f"{', '.join(missing)} is missing; install that one, or use --rollout-engine-placement process."
        )
    return NativeApi(version=version, **modules)


class NativeDelivery:
    """Sends complete sets of weights to remote engines; `WeightSynchronizer` uses it in place of an engine.

    Args:
        entries: the tensors of every stream, in order (`WeightGatherer.entries`).
        init_info: vLLM's description of a transport; `nccl_init_info` makes the usual one.
        client: talks to the engines; see vLLM's VLLMWeightSyncClient.
        api: from `probe`.
    """

    def __init__(self, entries: Sequence[TensorEntry], init_info: Any, client: Any, api: NativeApi) -> None:
        """Connect to the engines; collective over all trainer ranks and engine workers."""
        self.version: int | None = None
        self.float32_weights: frozenset[str] = frozenset()
        self._source = _source(api, entries)
        self._trainer = api.factory.WeightTransferTrainerFactory.trainer_init(
            init_info, client=client, source=self._source
        )

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> UpdateReport:
        """Send one set. Every trainer rank calls it; only the first talks to the engines."""
        self.version = None
        self._source.stream = weights
        self._trainer.send_weights()
        if (left := next(weights, None)) is not None:
            raise SyncError(f"vLLM's weight transfer stopped reading before {left[0]}.")
        self.version = version
        return UpdateReport(reloaded=len(self._source.entries))

    def shutdown(self) -> None:
        """Leave the engines' group."""
        self.version = None
        self._trainer.shutdown()


def nccl_init_info(
    api: NativeApi, *, rank: int, master_address: str, master_port: int, engine_workers: int, bucket_bytes: int
) -> Any:
    """init_info for NCCL: one sending trainer rank, `engine_workers` receivers, two buffers of `bucket_bytes`."""
    return api.nccl_engine.NCCLTrainerInitInfo(
        rank=rank,
        master_address=master_address,
        master_port=master_port,
        world_size=1 + engine_workers,
        packed=True,
        packed_buffer_size_bytes=bucket_bytes,
        packed_num_buffers=2,
    )


def http_client(api: NativeApi, url: str, *, timeout: float) -> Any:
    """Client of one vLLM server; requests that take longer than `timeout` seconds raise."""
    return api.clients.HTTPVLLMWeightSyncClient(url, timeout=timeout)


def _source(api: NativeApi, entries: Sequence[TensorEntry]) -> Any:
    """A vLLM WeightSource that yields one stream after another."""

    class Source(api.base.WeightSource):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self.entries = list(entries)
            self.stream: Iterator[tuple[str, torch.Tensor]] = iter(())

        def metadata(self) -> list[Any]:
            return [api.base.ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self.entries]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return self.stream

    return Source()


def _has(module: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True
