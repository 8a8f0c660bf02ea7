"""Publisher: sends the trainer's weights to the engine when they are due, and proves that they arrived."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from megatron_vcpo.config import SyncConfig
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.flow.trainer import Trainer
from megatron_vcpo.runtime import phases
from megatron_vcpo.runtime.agreement import raise_together
from megatron_vcpo.runtime.logs import log_single_rank
from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.receiver import WeightReceiver
from megatron_vcpo.sync.synchronizer import WeightSynchronizer
from megatron_vcpo.sync.verify import compare_logprobs

logger = logging.getLogger(__name__)

_VERIFIED_TRAJECTORIES = 32  # number of trajectories to compare after a verified publication


class Publisher:
    """Publishes weights; all ranks take part.

    Args:
        synchronizer: moves the weights.
        receiver: what the weights are published to.
        config: when to publish, and which publications are verified.
        tolerance: largest mean absolute difference of log-probs after a verified publication, in nats.
        model: Megatron's list of model chunks.
        stale_replicas: the optimizer, if parameters are gathered only before the next forward pass
            (--overlap-param-gather); else None.
    """

    def __init__(
        self,
        synchronizer: WeightSynchronizer,
        receiver: WeightReceiver,
        config: SyncConfig,
        *,
        tolerance: float,
        model: list[Any],
        stale_replicas: Any | None,
    ) -> None:
        self.receiver = receiver
        self._synchronizer = synchronizer
        self._config = config
        self._tolerance = tolerance
        self._model = model
        self._stale_replicas = stale_replicas
        self._published = 0
        self._unproven = False  # log-probs have not been compared since the last verified publication

    def is_due(self, version: int) -> bool:
        """Whether the engine's weights are too old to generate for the policy's version."""
        held = self.receiver.version
        return held is None or version - held >= self._config.interval

    def publish(self, version: int) -> None:
        """Replace the engine's weights by the trainer's and give them the number `version`. Raises SyncError on every
        rank."""
        from megatron.training import training

        phases.enter("publish weights")
        if self._stale_replicas is not None:
            training.force_param_sync(self._model, optimizer=self._stale_replicas)
        verify = self._config.verifies(self._published)
        report = self._synchronizer.publish(version, verify=verify)
        self._published += 1
        self._unproven |= verify
        if verify and report.unreadable:
            log_single_rank(
                logger,
                logging.INFO,
                f"verified the weights of version {report.version}, but for {len(report.unreadable)} tensors that the "
                f"engine keeps packed ({report.unreadable[0]}, ...): there the log-probs decide",
            )

    def needs_proof(self, version: int) -> bool:
        """Whether the engine's samples must be compared with the trainer; only if both have weights of `version`."""
        return self._unproven and self.receiver.version == version

    def prove(self, trajectories: Sequence[Trajectory], trainer: Trainer) -> bool:
        """Compare the engine's log-probs with the trainer's on the responses just sampled; False if there are none.

        Raises:
            SyncError: on every rank, if they differ by more than rounding explains.
        """
        probe = [t for t in trajectories if len(t.response_ids)][:_VERIFIED_TRAJECTORIES]
        if not probe:
            return False
        phases.enter("verify the engine")
        ours = trainer.logprobs_of(probe)
        failure: SyncError | None = None
        if ours:
            try:
                compare_logprobs(
                    [ours[i] for i in sorted(ours)],
                    [probe[i].behavior_logprobs for i in sorted(ours)],
                    tolerance=self._tolerance,
                    version=self.receiver.version,
                )
            except SyncError as error:
                failure = error
        raise_together(failure)
        self._unproven = False
        return True
