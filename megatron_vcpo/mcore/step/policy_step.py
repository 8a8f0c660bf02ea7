"""PolicyStep: everything that happens to one minibatch between the buffer and the optimizer.

The order within a step: begin() packs (and, where baselines span micro-batches, scores) the trajectories; Megatron's
schedule calls forward_step() for each micro-batch; finalize() runs after the last backward, reduces the effective
sample size and sets the learning rate; guard() refuses an unsound update; end() returns the metrics. If `repeat` is
then set, pass the same trajectories to begin() again: see exclusions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.data.trajectory import Float32Array, Trajectory
from megatron_vcpo.mcore.context_parallel import gather_context_rows
from megatron_vcpo.mcore.energies.exact import Measured
from megatron_vcpo.mcore.energies.gradients import TwoPass, applied_factors
from megatron_vcpo.mcore.forward import packed_seq_params, token_statistics
from megatron_vcpo.mcore.logprobs import OutputContext
from megatron_vcpo.mcore.packed_minibatch import PackedMinibatch, PackingSettings, needs_scoring_pass, pack_minibatch
from megatron_vcpo.mcore.packing import MicroBatch
from megatron_vcpo.mcore.reductions import agree, from_last_stage, is_last_stage, sum_over
from megatron_vcpo.mcore.reference import ReferencePolicy
from megatron_vcpo.mcore.routers.accounting import route_metrics
from megatron_vcpo.mcore.routers.replay import RouterReplay
from megatron_vcpo.mcore.routers.state import ExpertBiases, RouterLog
from megatron_vcpo.mcore.step.advantages import minibatch_advantages
from megatron_vcpo.mcore.step.exclusions import Exclusions
from megatron_vcpo.mcore.step.outcome import StepOutcome, Verdict
from megatron_vcpo.mcore.step.scoring import baseline_columns, log_weights, minibatch_baselines, usable_of
from megatron_vcpo.mcore.step.soundness import broken_parameter, gradients_finite
from megatron_vcpo.mcore.step.statistics import StepStatistics
from megatron_vcpo.objective import (
    LossInputs,
    LossOutputs,
    finite_trajectories,
    load_advantages,
    load_loss,
    trajectory_baselines,
)
from megatron_vcpo.optim import EssParamScheduler

ForwardBackward = Callable[..., list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a step must know besides the objective's flags."""

    vocab_size: int  # real tokens; columns beyond them are padding
    temperature: float  # of the rollouts
    max_response_length: int
    packing: PackingSettings
    sequence_length: int  # given to Megatron's schedule where lengths vary, and without effect there
    fp16: bool = False  # True: Megatron's loss scaler handles non-finite gradients


class PolicyStep:
    """One optimizer step of VCPO on Megatron-Core's schedules; see the module's docstring for the order of calls."""

    def __init__(
        self,
        config: VCPOConfig,
        settings: StepSettings,
        *,
        groups: Any,
        scheduler: EssParamScheduler,
        device: torch.device,
    ) -> None:
        """Args:
        config: the objective.
        settings: layout and sampling.
        groups: Megatron-Core's ProcessGroupCollection with tp, pp, cp, dp and dp_cp.
        scheduler: receives rho once a step.
        device: of the micro-batches.
        """
        self.config = config
        self.settings = settings
        self.groups = groups
        self.scheduler = scheduler
        self.device = device
        self.loss = load_loss(config.loss)
        self.advantages = load_advantages(config.advantages)
        self.reference: ReferencePolicy | None = None
        self.replay: RouterReplay | None = None
        self.energies: TwoPass | None = None  # with --vcpo-energy exact
        self.minibatch: PackedMinibatch | None = None
        self.skip_reason = ""
        self.repeat = False  # refused only to be made again without trajectories that turned out not to be finite
        self.outcome: StepOutcome | None = None  # of the last step that end() finished
        self._exclusions = Exclusions(groups, device)
        self._statistics = StepStatistics(config, groups, device)
        self._result: dict[str, float] = {}
        self._lag = 0.0
        self._scored_fallbacks = 0.0
        self._measuring_overflowed = False
        self._expert_biases: ExpertBiases | None = None
        self._router_log: RouterLog | None = None
        self._context = OutputContext(
            vocab_size=settings.vocab_size,
            temperature=settings.temperature,
            chunk=config.logit_chunk,
            tp_group=groups.tp,
        )

    # ------------------------------------------------------------------ before the forward passes

    def begin(
        self,
        trajectories: Sequence[Trajectory],
        *,
        model: list[Any],
        forward_backward: ForwardBackward,
        lag: float = 0.0,
    ) -> None:
        """Prepare a minibatch; collective over all ranks, which must hold the same trajectories in the same order.

        Args:
            trajectories: the whole minibatch, of all data-parallel ranks. Those that are not finite take no part; when
                given again after an attempt that set `repeat`, neither do those that the attempt found.
            model: Megatron's list of model chunks.
            forward_backward: Megatron's schedule, for scoring passes.
            lag: age of the minibatch in optimizer steps.
        """
        if self.replay is not None:
            self.replay.require_routes(trajectories)
        if not (self.repeat and self._exclusions.is_of(trajectories)):
            self._exclusions.begin(trajectories)
        self.repeat = False
        self._expert_biases = ExpertBiases(model)
        self._router_log = RouterLog()
        self._lag = lag
        self.skip_reason = ""
        self._prepare(model, forward_backward)
        self._statistics.reset()  # scoring and evaluation add to the same statistics
        self._result = {}

    def _prepare(self, model: list[Any], forward_backward: ForwardBackward) -> None:
        """Build the minibatch and score it; again whenever a pass shows that a trajectory cannot be trained on."""
        while True:
            trajectories = [] if self.skip_reason else self._exclusions.kept
            batch = self.minibatch = pack_minibatch(trajectories, self.config, self.settings.packing, self.device)
            if self.advantages is not None:
                batch.advantages = minibatch_advantages(self.advantages, trajectories, self.config, self.device)
            self._scored_fallbacks = 0.0
            self._measuring_overflowed = False
            if self.config.kl_coefficient > 0.0:
                self._score_reference(model, forward_backward)
                if self._found_more(model):
                    continue
            if not self.config.baseline.startswith("opob"):
                batch.baselines = self._mean_baselines()
                return
            if self.energies is not None:
                self.energies.begin(self, model, forward_backward)
            elif needs_scoring_pass(self.config, batch.plan):
                self._score_baselines(model, forward_backward)
            if batch.baselines is None or not self._found_more(model):
                return

    def _found_more(self, model: list[Any]) -> bool:
        """Leave out the trajectories marked so far; returns whether there were any. Collective over all ranks."""
        if not self._exclusions.exclude_marked():
            return False
        broken = broken_parameter(model)
        if broken is not None:
            self.skip_reason = f"the parameter {broken} is not finite"
        elif self._exclusions.exhausted:
            self.skip_reason = f"each pass found more log-probs that are not finite ({len(self.excluded)} trajectories)"
        return True

    @property
    def excluded(self) -> frozenset[int]:
        """Places, among the trajectories given to begin(), of those that take no part in the step."""
        return self._exclusions.excluded

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of this step, the same on every rank."""
        return self._current().plan.num_micro_batches

    @property
    def sequence_length(self) -> int:
        """seq_length and decoder_seq_length for Megatron's schedule: the rows of a micro-batch if all have equally
        many; otherwise any length will do (the schedule then exchanges shapes with every tensor)."""
        if self.settings.packing.alignment.equal_rows:
            return self._current().micro_batches[0].num_rows
        return self.settings.sequence_length

    def data_iterator(self) -> Iterator[MicroBatch]:
        """A fresh iterator over this rank's micro-batches (one for each model chunk under interleaving)."""
        return iter(list(self._current().micro_batches))

    def _current(self) -> PackedMinibatch:
        if self.minibatch is None:
            raise RuntimeError("PolicyStep.begin(trajectories) must come before the forward passes of a step.")
        return self.minibatch

    def _mean_baselines(self) -> Tensor:
        batch = self._current()
        return trajectory_baselines(
            rewards=batch.rewards, group_ids=batch.group_ids, log_energies=None, config=self.config
        )

    # ------------------------------------------------------------------ forward-only passes

    def score(self, model: list[Any], forward_backward: ForwardBackward) -> list[dict[str, Tensor]]:
        """Token statistics of this rank's micro-batches under the current weights; empty except on the last stage.

        Returns:
            One dict {'logprobs', 'energy', 'entropy'} of [T] tensors for each micro-batch.
        """
        with torch.no_grad():
            outputs = self.run_pass(model, forward_backward, forward_only=True, collect_non_loss_data=True)
        if self.replay is not None:
            self.replay.finish_pass(training=False)
        return outputs

    def run_pass(self, model: list[Any], forward_backward: ForwardBackward, **options: Any) -> list[Any]:
        """A pass of the schedule over the minibatch, in addition to the step's own."""
        chunks = [self.data_iterator() for _ in model]
        return forward_backward(
            forward_step_func=self.forward_step,
            data_iterator=chunks if len(chunks) > 1 else chunks[0],
            model=model,
            num_microbatches=self.num_micro_batches,
            seq_length=self.sequence_length,
            micro_batch_size=1,
            decoder_seq_length=self.sequence_length,
            **options,
        )

    def close_pass(self) -> None:
        """Check that every layer read the routes of a backward pass that is not the step's last."""
        if self.replay is not None:
            self.replay.finish_pass(training=True)

    def logprobs_of(
        self, trajectories: Sequence[Trajectory], *, model: list[Any], forward_backward: ForwardBackward
    ) -> dict[int, Float32Array]:
        """The trainer's log-probs of trajectories' responses, at the rollouts' temperature. Call between steps only.

        Returns:
            Index in `trajectories` -> [L], for this data-parallel rank's trajectories; empty except on the last
            pipeline stage.
        """
        self.minibatch = pack_minibatch(trajectories, self.config, self.settings.packing, self.device)
        found: dict[int, Float32Array] = {}
        for micro, stats in zip(self.minibatch.micro_batches, self.score(model, forward_backward)):
            values = stats["logprobs"].float().cpu().numpy()
            for index, start in zip(micro.indices, micro.starts):
                first = start + len(trajectories[index].prompt_ids) - 1
                found[index] = values[first : first + len(trajectories[index].response_ids)]
        self.minibatch = None
        return found

    def _score_reference(self, model: list[Any], forward_backward: ForwardBackward) -> None:
        if self.reference is None:
            raise RuntimeError(
                "--vcpo-kl-coefficient above 0 needs PolicyStep.reference; set it before the first step."
            )
        with self.reference.in_place_of(model):
            outputs = self.score(model, forward_backward)
        for micro, stats in zip(self._current().micro_batches, outputs):
            micro.reference_logprobs = stats["logprobs"]
            self._mark(micro, finite_trajectories(stats["logprobs"], micro.response_mask, micro.trajectory_ends))

    def _mark(self, micro: MicroBatch, usable: Tensor) -> None:
        self._exclusions.mark(micro.indices, usable)

    def _score_baselines(self, model: list[Any], forward_backward: ForwardBackward) -> None:
        batch = self._current()
        outputs = self.score(model, forward_backward)
        columns = torch.zeros(3, batch.num_trajectories, dtype=torch.float64, device=self.device)
        for micro, stats in zip(batch.micro_batches, outputs):
            if micro.num_trajectories:
                index = torch.tensor(micro.indices, device=self.device)
                columns[:, index] = baseline_columns(micro, stats, self.config)
                self._mark(micro, usable_of(micro, stats, batch.rewards, self.config))
        if is_last_stage(self.groups.pp):
            sum_over(columns, self.groups.dp)  # each trajectory is on exactly one data-parallel rank
        from_last_stage(columns, self.groups.pp)
        self.set_baselines(Measured(*columns))

    def set_baselines(self, measured: Measured) -> None:
        """Set the minibatch's baselines from what a pass over it measured."""
        batch = self._current()
        if self.settings.fp16 and self.energies is not None:
            lost = torch.isfinite(measured.log_weights) & ~torch.isfinite(measured.energies)
            self._measuring_overflowed = bool(lost.any())
        usable = torch.isfinite(measured.log_weights)
        self._exclusions.mark(range(batch.num_trajectories), usable)
        result = minibatch_baselines(batch, measured, self.config, self.settings.max_response_length)
        fallbacks = float((result.fallback & usable).sum().item())
        self._scored_fallbacks = fallbacks / max(1, batch.num_trajectories)
        batch.baselines = result.values

    def applied_factors(self, log_weights: Tensor, lengths: Tensor) -> Tensor:
        """What multiplies -(R_i - b_i) * scale_i * grad sum_t a_it log p_it in the gradient: [n] fp64."""
        return applied_factors(log_weights, lengths, self._current(), self.config, self.settings.max_response_length)

    # ------------------------------------------------------------------ Megatron's forward step

    def forward_step(self, data_iterator: Iterator[MicroBatch], model: Any) -> tuple[Any, Callable[..., Any]]:
        """Megatron's forward_step_func: the model's token statistics and the loss function that takes them."""
        micro = next(data_iterator)
        packed = packed_seq_params(micro)
        if self.replay is not None:
            self.replay.attach(packed, micro, model)
        measured = self.energies if self.energies is not None and self.energies.measuring else None
        with measured.forward(micro, packed) if measured is not None else nullcontext():
            output = token_statistics(model, micro, packed, self._context)
        return output, partial(self._loss, micro)

    def _loss(self, micro: MicroBatch, output: dict[str, Tensor], non_loss_data: bool = False) -> Any:
        if micro.context_rows is not None:
            # From here on every context-parallel rank computes the whole loss, and the gradient reaches only its own
            # rows.
            output = gather_context_rows(output, micro.context_rows, self.groups.cp)
        if non_loss_data:
            return {name: value.detach().clone() for name, value in output.items()}
        # Megatron divides the gradients by the sum of the counts returned here, and scales the MoE auxiliary losses
        # by the rows that passed the router: so the number of rows is returned, and the loss is multiplied by it.
        rows = torch.tensor(micro.tokens.size(1), dtype=torch.int, device=self.device)
        if self.energies is not None and self.energies.measuring:
            loss, logged = self.energies.loss(self, micro, output)
            return loss, rows, logged
        outputs = self.evaluate(micro, output)
        # The schedule scales its loss in place, so the logged value must be a copy.
        logged = torch.stack([outputs.loss.detach().clone(), outputs.loss.new_ones(())])
        return outputs.loss * float(self._current().num_rows), rows, {"vcpo loss": logged}

    def evaluate(self, micro: MicroBatch, output: dict[str, Tensor]) -> LossOutputs:
        """The loss of one micro-batch from its token statistics; its metrics are added to the step's."""
        batch = self._current()
        index = torch.tensor(micro.indices, dtype=torch.int64, device=self.device)
        outputs = self.loss(
            LossInputs(
                policy_logprobs=output["logprobs"],
                behavior_logprobs=micro.behavior_logprobs,
                mask=micro.response_mask,
                cu_seqlens=micro.trajectory_ends,
                rewards=batch.rewards[index],
                group_ids=batch.group_ids[index],
                advantage_scales=batch.advantage_scales[index],
                advantages=None if batch.advantages is None else batch.advantages[index],
                num_trajectories=float(batch.num_trajectories),
                num_tokens=float(max(batch.num_response_tokens, 1)),
                max_response_length=self.settings.max_response_length,
                config=self.config,
                token_energies=output["energy"],
                baselines=None if batch.baselines is None else batch.baselines[index],
                reference_logprobs=micro.reference_logprobs,
                entropy=output["entropy"],
            )
        )
        self._check_loss(outputs)
        usable = usable_of(micro, output, batch.rewards, self.config)
        self._mark(micro, usable)
        self._statistics.add(outputs.metrics, log_weights(micro, output["logprobs"]), usable)
        return outputs

    def forget_metrics(self) -> None:
        """Drop the metrics that passes other than the step's own have added."""
        self._statistics.reset()

    def _check_loss(self, outputs: LossOutputs) -> None:
        # A detached loss would silently train nothing.
        scalar = isinstance(outputs, LossOutputs) and outputs.loss.dim() == 0
        if not scalar or (torch.is_grad_enabled() and not outputs.loss.requires_grad):
            raise ConfigError(
                f"--vcpo-loss {self.config.loss} must return LossOutputs with a scalar loss attached to the graph of "
                "policy_logprobs."
            )

    # ------------------------------------------------------------------ after the backward passes

    def settle(self, model: list[Any]) -> None:
        """Complete the gradients. Call on all ranks after the last backward, before gradients are reduced."""
        if self.energies is not None:
            self.energies.settle(self, model)

    def finalize(self, model: list[Any]) -> None:
        """Reduce the step's statistics, set its learning rate and decide whether it may be taken. Call on all ranks."""
        batch = self._current()
        reduced = self._statistics.reduce()
        multiplier = self.scheduler.apply(reduced.rho, self._lag)
        found_more = reduced.usable < batch.num_trajectories and self._found_more(model)
        if reduced.usable == 0:
            self.skip_reason = self.skip_reason or "no trajectory has a finite importance weight"
        elif batch.num_response_tokens == 0:
            # Without a gradient, Adam's moments and weight decay would still move the parameters.
            self.skip_reason = self.skip_reason or "no trajectory has a sampled token"
        self.repeat = found_more and not self.skip_reason
        broken = not self.settings.fp16 and not gradients_finite(model)
        if agree(multiplier, broken, what="The learning-rate multiplier", device=self.device) and not self._refused:
            self.skip_reason = "a gradient is not finite"
        if self._measuring_overflowed and not self._refused:
            # The step's own backward may fit the loss scale even though the measuring one overflowed. Its baselines are
            # still wrong, so the scaler must see an overflow, on every rank.
            for chunk in model:
                chunk.buffers[0].grad_data.view(-1)[0] = math.inf
        routes = {}
        if self.replay is not None:
            self.replay.finish_pass(training=True)
            routes = route_metrics(self.replay, batch.trajectories, self.device)
        self._result = {
            "rho": reduced.rho,
            "rho_reference": self.scheduler.reference,
            "lr_multiplier": multiplier,
            "lr": max((float(group["lr"]) for group in self.scheduler.optimizer.param_groups), default=math.nan),
            **reduced.metrics,
            **routes,
            **self._shares(reduced.metrics),
        }

    def _shares(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics as shares of all trajectories given to begin(), so that multiplying by their number gives counts."""
        given = max(1, len(self._exclusions.given))
        kept = self._current().num_trajectories / given
        return {
            "nonfinite_trajectories": len(self.excluded) / given,
            "vetoed": metrics.get("vetoed", 0.0) * kept,
            "baseline_fallbacks": max(metrics.get("baseline_fallbacks", 0.0), self._scored_fallbacks) * kept,
        }

    @property
    def _refused(self) -> bool:
        return self.repeat or bool(self.skip_reason)

    def guard(self, optimizer_step: Callable[[], tuple[bool, Any, Any]]) -> tuple[bool, Any, Any]:
        """Replaces optimizer.step(): takes the step unless finalize() found a reason not to."""
        if self._refused:
            return False, None, None
        return optimizer_step()

    def end(self, *, success: bool, grad_norm: float | None) -> dict[str, float]:
        """Finish the step and return its metrics; the scheduler goes back to its base learning rate.

        `outcome` then holds the result of the step.
        """
        self.scheduler.restore()
        batch = self._current()
        if not success and self._expert_biases is not None:
            self._expert_biases.restore()  # Megatron changed them before the update that was then not made
        if self.repeat and self._router_log is not None:
            self._router_log.restore()  # the attempt that is trained on logs its own
        verdict = self._verdict(success)
        result = {
            **self._result,
            "grad_norm": math.nan if grad_norm is None else float(grad_norm),
            "skipped": float(verdict is not Verdict.TRAINED),
            "overflow": float(verdict is Verdict.OVERFLOW),
            "n_trajectories": float(len(self._exclusions.given)),
            "n_micro_batches": float(batch.plan.num_micro_batches),
            "packing_efficiency": batch.num_real_tokens / max(1, batch.num_rows),
            "packing_balance": sum(batch.rank_rows) / (len(batch.rank_rows) * max(1, *batch.rank_rows)),
        }
        self.minibatch = None
        self.outcome = StepOutcome(verdict=verdict, metrics=result, reason=self.skip_reason, excluded=self.excluded)
        return result

    def _verdict(self, success: bool) -> Verdict:
        if success:
            return Verdict.TRAINED
        if self.repeat:
            return Verdict.REPEAT
        if self.settings.fp16 and not self.skip_reason:
            return Verdict.OVERFLOW
        self.skip_reason = self.skip_reason or "Megatron did not complete it"
        return Verdict.SKIPPED
