"""WeightSynchronizer: publishes all of the trainer's weights to the engine, or raises."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_vcpo.config import SyncConfig
from megatron_vcpo.data.digests import digest
from megatron_vcpo.models.naming import Family, ModelShape
from megatron_vcpo.runtime.agreement import raise_together
from megatron_vcpo.sync.deadline import Deadline
from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.gather import WeightGatherer
from megatron_vcpo.sync.receiver import UpdateReport, WeightReceiver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Figures of one publication on this rank."""

    version: int
    seconds: float
    bytes: int
    tensors: int
    copied: int  # tensors written directly into the engine's memory; the others went through its own loader
    verified: bool
    unreadable: tuple[str, ...]  # tensors that the engine cannot read back: only its log-probs can show an error


class WeightSynchronizer:
    """Moves all weights of a Megatron model into an engine; all ranks take part.

    Args:
        model_chunks: this rank's GPTModels, wrapped or not; one for each virtual pipeline stage.
        family: the table of names.
        shape: sizes of the whole model.
        groups: process groups `tp`, `pp`, `ep`, `expt_tp` (ProcessGroupCollection); None for a single process.
        engine: this rank's engine.
        config: bucket size and deadline.
        dtype: of the engine's weights.

    Raises:
        SyncError: model and table disagree; every name is listed, and nothing has been sent.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        family: Family,
        shape: ModelShape,
        groups: Any | None,
        engine: WeightReceiver,
        config: SyncConfig,
        *,
        dtype: torch.dtype,
    ) -> None:
        self.engine = engine
        self._dtype = dtype
        self._timeout = config.timeout
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.gatherer = WeightGatherer(
            model_chunks,
            family,
            shape,
            groups,
            dtype=dtype,
            bucket_bytes=config.bucket_bytes,
            keep_float32=engine.float32_weights,
        )

    def publish(self, version: int, *, verify: bool = False) -> SyncReport:
        """Replace the engine's weights by the trainer's and give them the number `version`.

        Call it on every rank. With --overlap-param-gather, force the parameters' synchronisation first.

        Args:
            version: optimizer steps taken.
            verify: overwrite the engine's old weights with garbage first; then compare what it holds with what arrived,
                and what arrived with what was sent.

        Raises:
            SyncError: on every rank, if on any rank a weight is not finite or overflows the engine's dtype, or the
                engine refuses a tensor, leaves tensors unread, holds something else, or takes longer than
                --sync-timeout for one tensor. The engine then serves no version.
        """
        started = time.perf_counter()
        source = self.gatherer.stream()
        deadline = Deadline(self._timeout, "--sync-timeout")
        delivery = _Delivery(self.gatherer.names, self._dtype, deadline, digests={} if verify else None)
        failure: SyncError | None = None
        report = UpdateReport()
        with deadline.running():
            try:
                arguments = {"verify": True} if verify else {}
                report = self.engine.update_weights(delivery.watch(source), version, **arguments) or report
                failure = delivery.difference(report)
            except Exception as error:  # noqa: BLE001 - raised below, on all ranks together
                failure = delivery.failure(error, f"The engine of rank {self._rank} could not take version {version}")
            try:
                for _ in delivery.rest(source):  # other ranks run the stream's collectives to the end
                    pass
            except Exception as error:  # noqa: BLE001 - raised below, on all ranks together
                failure = failure or delivery.failure(error, f"Rank {self._rank} could not end version {version}")
        try:
            raise_together(failure)
        except SyncError:
            self.engine.version = None
            raise
        done = SyncReport(
            version=version,
            seconds=time.perf_counter() - started,
            bytes=delivery.bytes,
            tensors=len(delivery.written),
            copied=report.copied,
            verified=verify,
            unreadable=report.unreadable,
        )
        logger.debug(
            "published version %d: %d tensors, %d bytes, %.2f s", version, done.tensors, done.bytes, done.seconds
        )
        return done


class _Delivery:
    """One publication: checks each tensor on its way and remembers which ones were written."""

    def __init__(
        self, expected: list[str], dtype: torch.dtype, deadline: Deadline, digests: dict[str, int] | None
    ) -> None:
        self.expected = expected
        self.written: list[str] = []
        self.bytes = 0
        self._dtype = dtype
        self._deadline = deadline
        self._digests = digests
        self._current: str | None = None
        self._refused: SyncError | None = None

    def watch(self, source: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors on. A tensor counts as written once the next one is asked for."""
        for name, tensor in self.rest(source):
            self._current = name
            if not is_finite(tensor):
                self._refused = SyncError(self._non_finite(name, tensor))
                raise self._refused
            if self._digests is not None:
                self._digests[name] = digest(tensor)
            self._deadline.waiting_for(f"the engine to take {name}")
            yield name, tensor
            self.written.append(name)
            self.bytes += tensor.nbytes
        self._current = None
        self._deadline.waiting_for("the engine to finish after the last tensor")

    def rest(self, source: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the ranks still gather, each within the deadline."""
        number = len(self.written)
        while True:
            coming = self.expected[number] if number < len(self.expected) else "the end"
            self._deadline.waiting_for(f"the model-parallel ranks to bring {coming} together")
            try:
                item = next(source)
            except StopIteration:
                return
            except SyncError:
                raise
            except Exception as error:
                self._refused = SyncError(f"The trainer's ranks could not bring {coming} together: {_words(error)}")
                self._refused.__cause__ = error
                raise self._refused from error
            number += 1
            yield item

    def difference(self, report: UpdateReport) -> SyncError | None:
        """The error if the engine left tensors unread or received other bits than were sent, else None."""
        if unread := self.expected[len(self.written) :]:
            return SyncError(f"The engine left weights unread: {', '.join(unread)}.")
        if self._digests is None:
            return None
        received = report.received
        if received is None:
            return SyncError("This engine reports no digests; use --sync-verify off, or an engine that does.")
        wrong = [name for name in self.expected if received.get(name) != self._digests[name]]
        if wrong:
            return SyncError(
                f"{len(wrong)} tensors reached the engine with other bits than they were sent with: "
                f"{', '.join(wrong[:5])}."
            )
        return None

    def failure(self, error: Exception, what: str) -> SyncError:
        """The error of this publication, naming the tensor at which it occurred."""
        if self._refused is not None:
            return self._refused
        place = f" while it was given {self._current}" if self._current else ""
        failure = SyncError(f"{what}{place}: {_words(error)}")
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


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is finite. One sum decides; only if it is not finite are the elements checked."""
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return True
    return bool(torch.isfinite(tensor).all())
