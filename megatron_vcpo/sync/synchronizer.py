"""WeightSynchronizer: publishes the trainer's weights to the engine, all of them or an error."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_vcpo.agreement import raise_together
from megatron_vcpo.config import SyncConfig
from megatron_vcpo.rollout.engine import RolloutEngine
from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.gather import WeightGatherer
from megatron_vcpo.sync.naming import Family, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One publication, as this rank saw it."""

    version: int
    seconds: float
    bytes: int
    tensors: int


class WeightSynchronizer:
    """Moves all weights of a Megatron model into an engine, on every rank together.

    Args:
        model_chunks: this rank's GPTModels, wrapped or not; one for each virtual pipeline stage.
        family: the table of names.
        shape: sizes of the whole model.
        groups: process groups `tp`, `pp`, `ep`, `expt_tp` (ProcessGroupCollection); None for a single process.
        engine: this rank's engine.
        config: bucket size.
        dtype: the engine's weights.

    Raises:
        SyncError: model and table disagree; every name is listed, and nothing has been sent.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        family: Family,
        shape: ModelShape,
        groups: Any | None,
        engine: RolloutEngine,
        config: SyncConfig,
        *,
        dtype: torch.dtype,
    ) -> None:
        self.engine = engine
        self._dtype = dtype
        self.gatherer = WeightGatherer(
            model_chunks, family, shape, groups, dtype=dtype, bucket_bytes=config.bucket_bytes
        )

    def publish(self, version: int) -> SyncReport:
        """Replace the engine's weights by the trainer's and name them `version` (optimizer steps taken).

        Call it on every rank. With --overlap-param-gather, force the parameters' synchronisation first.

        Raises:
            SyncError: on every rank, when on any a weight is not finite or does not fit the engine's type, the engine
                refused, or it left tensors unread. The engine then serves no version.
        """
        started = time.perf_counter()
        source = self.gatherer.stream()
        delivery = _Delivery(self.gatherer.names, self._dtype)
        failure: SyncError | None = None
        try:
            self.engine.update_weights(delivery.watch(source), version)
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks together
            failure = delivery.failure(error)
        # the other ranks are in the stream's collectives until the end
        for _ in source:
            pass
        if failure is None and len(delivery.written) != len(delivery.expected):
            failure = SyncError(f"The engine left weights unread: {', '.join(delivery.unread())}.")
        try:
            raise_together(failure)
        except SyncError:
            self.engine.version = None
            raise
        return SyncReport(
            version=version,
            seconds=time.perf_counter() - started,
            bytes=delivery.bytes,
            tensors=len(delivery.written),
        )


class _Delivery:
    """The ledger of one publication: checks each tensor on its way and remembers it."""

    def __init__(self, expected: list[str], dtype: torch.dtype) -> None:
        self.expected = expected
        self.written: list[str] = []
        self.bytes = 0
        self._dtype = dtype
        self._current: str | None = None
        self._refused: SyncError | None = None

    def watch(self, source: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors on; the one just handed over counts as written when the next is asked for."""
        for name, tensor in source:
            self._current = name
            if not is_finite(tensor):
                self._refused = SyncError(self._non_finite(name, tensor))
                raise self._refused
            yield name, tensor
            self.written.append(name)
            self.bytes += tensor.nbytes
        self._current = None

    def unread(self) -> list[str]:
        """Names that the engine never asked for."""
        return self.expected[len(self.written) :]

    def failure(self, error: Exception) -> SyncError:
        """The error of this publication, naming the tensor it happened at."""
        if self._refused is not None:
            return self._refused
        place = f" while it was given {self._current}" if self._current else ""
        failure = SyncError(f"The engine could not take the weights{place}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def _non_finite(self, name: str, tensor: torch.Tensor) -> str:
        nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        if self._dtype is torch.float16 and inf and not nan:
            return (
                f"{name}: {inf} values are outside the range of float16 (65504); "
                "use --rollout-engine-dtype bfloat16 or float32."
            )
        return f"{name} holds {nan} NaN and {inf} infinite values; the last optimizer step went wrong."


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is finite. One sum decides; only one that overflows is followed by an exact look."""
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return True
    return bool(torch.isfinite(tensor).all())
