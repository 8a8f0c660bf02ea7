"""ExactEnergies: backward passes that measure the energies of minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.mcore.energies.attach import Attachment
from megatron_vcpo.mcore.energies.collector import EnergyCollector, MicroBatchRows, Sink
from megatron_vcpo.mcore.energies.contributions import Products
from megatron_vcpo.mcore.energies.isolation import energy_schedule
from megatron_vcpo.mcore.energies.layout import EnergyLayout
from megatron_vcpo.mcore.packing import MicroBatch
from megatron_vcpo.mcore.reductions import from_last_stage, is_last_stage, sum_over
from megatron_vcpo.objective import energy_token_weights, segment_ids, segment_sum, sequence_log_weights
from megatron_vcpo.runtime.agreement import raise_together


class Measured(NamedTuple):
    """What one pass measured of the trajectories of a minibatch: [N] fp64 each, the same on every rank."""

    log_weights: Tensor
    energies: Tensor  # E_i for `trajectory_log_energies`
    lengths: Tensor


@dataclass(kw_only=True)
class EnergyPass:
    """A measuring backward pass over a minibatch that is under way."""

    collector: EnergyCollector
    columns: Tensor  # [3, N] fp64: log-weights, lengths, factors of the gradients; last stage only
    owners: dict[int, MicroBatchRows] = field(default_factory=dict)  # id of a micro-batch -> owners of its rows


class ExactEnergies:
    """Measures the exact energies of minibatches of one model; between passes it leaves the model as it was."""

    def __init__(self, model: list[Any], groups: Any, config: VCPOConfig, device: torch.device) -> None:
        """Collective over all ranks. Raises ConfigError, on all of them, for a model that cannot be measured.

        Args:
            model: Megatron's list of model chunks.
            groups: ProcessGroupCollection with tp, pp, cp, tp_cp, dp, dp_cp, embd, and for experts tp_ep and expt_dp.
            config: the objective.
            device: of the micro-batches.
        """
        from megatron.core.utils import get_model_config

        self.model = model
        self.config = config
        self.device = device
        self.transformer = get_model_config(model[0])
        self.attachment = self._attach()
        self.layout = EnergyLayout.of(groups, with_experts=bool(self.transformer.num_moe_experts))
        self.groups = groups
        self._pass: EnergyPass | None = None

    def _attach(self) -> Attachment:
        failure: ConfigError | None = None
        try:
            attachment = Attachment(self.model)
        except ConfigError as error:
            failure = error
        raise_together(failure)
        return attachment

    @property
    def measuring(self) -> bool:
        """Whether a pass is under way."""
        return self._pass is not None

    # ------------------------------------------------------------------ one pass

    @contextmanager
    def measuring_pass(
        self,
        num_trajectories: int,
        *,
        sink: Sink | None = None,
        products: Products = Products.NONE,
        finalize: bool = False,
    ) -> Iterator[None]:
        """Within this context the schedule's passes measure, and form gradients only through the sink.

        Args:
            num_trajectories: N of the minibatch.
            sink: takes every contribution.
            products: whether the sink uses the trajectories' own weight gradients.
            finalize: keep the schedule's hook that finalizes gradients.
        """
        collector = EnergyCollector(
            self.layout,
            num_trajectories=num_trajectories,
            trainable=self.attachment.trainable,
            tied=self.attachment.tied,
            device=self.device,
            sink=sink,
            products=products,
        )
        columns = torch.zeros(3, num_trajectories, dtype=torch.float64, device=self.device)
        with self.attachment.active(collector), energy_schedule(self.transformer, finalize=finalize):
            self._pass = EnergyPass(collector=collector, columns=columns)
            try:
                yield
            finally:
                self._pass = None

    @contextmanager
    def forward(self, micro: MicroBatch, packed_seq_params: Any) -> Iterator[None]:
        """Wrap the model's forward of one micro-batch; attaches the owners of its rows to `packed_seq_params`."""
        current = self._current()
        if id(micro) not in current.owners:
            cp_rank = self.layout.cp.rank() if micro.context_rows is not None else 0
            current.owners[id(micro)] = MicroBatchRows.of(micro, cp_rank)
        packed_seq_params.energy_rows = current.owners[id(micro)]
        with current.collector.micro_batch(packed_seq_params.energy_rows):
            yield

    def loss(self, micro: MicroBatch, logprobs: Tensor, factors: Tensor | None = None) -> Tensor:
        """What a measuring pass back-propagates: sum_i factors_i sum_t a_it log p_it.

        Args:
            micro: the micro-batch.
            logprobs: [T] with gradient.
            factors: [n], default 1.
        """
        columns, n = self._current().columns, micro.num_trajectories
        index = torch.tensor(micro.indices, dtype=torch.int64, device=self.device)
        ids = segment_ids(micro.trajectory_ends, micro.num_rows)
        factors = torch.ones(n, dtype=torch.float64, device=self.device) if factors is None else factors
        weights = energy_token_weights(
            policy_logprobs=logprobs,
            behavior_logprobs=micro.behavior_logprobs,
            mask=micro.response_mask,
            cu_seqlens=micro.trajectory_ends,
            config=self.config,
        )
        weights = weights * torch.cat([factors, factors.new_zeros(1)])[ids]
        columns[0, index], columns[1, index] = self.weights_and_lengths(micro, logprobs)
        used = weights != 0.0
        loss = (torch.where(used, weights, 0.0).to(logprobs.dtype) * torch.where(used, logprobs, 0.0)).sum()

        def record(gradient: Tensor) -> None:  # the loss scale and anything else that the schedule multiplies by
            columns[2, index] = gradient.double() * factors

        loss.register_hook(record)
        return loss * 1.0  # a copy: the schedule may scale its loss in place, which the hook would not see

    def weights_and_lengths(self, micro: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-weights and response lengths of a micro-batch's trajectories: [n] fp64 each."""
        ends = micro.trajectory_ends
        log_weights = sequence_log_weights(logprobs.detach(), micro.behavior_logprobs, micro.response_mask, ends)
        ids = segment_ids(ends, micro.num_rows)
        return log_weights, segment_sum(micro.response_mask.double(), ids, micro.num_trajectories)

    def reduce(self) -> Measured:
        """What was measured so far; collective over all ranks, within the pass, between micro-batches."""
        current = self._current()
        table = current.collector.reduce()
        columns = current.columns.clone()
        if is_last_stage(self.groups.pp):
            sum_over(columns, self.groups.dp)  # each trajectory is on exactly one data-parallel rank
        from_last_stage(columns, self.groups.pp)
        log_weights, lengths, factors = columns
        # Kept by kind of parameter, for inspection. A trajectory with factor 0 was not measured at all.
        self.by_kind = torch.where(factors != 0.0, table / factors.square(), 0.0)
        return Measured(log_weights, self.by_kind.sum(0), lengths)

    def _current(self) -> EnergyPass:
        if self._pass is None:
            raise RuntimeError("No measuring pass is under way.")
        return self._pass
