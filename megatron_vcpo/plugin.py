"""The few seams by which VCPO sits in Megatron's training loop, all of them in this file.

`MegatronPlugin` is for Megatron's own `pretrain()` (see train.py); `register()` is for a loop of your own over
Megatron-Core. Both drive the same `PolicyStep`.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from megatron_vcpo.checkpoint import guard
from megatron_vcpo.checkpoint.save_folder import set_aside
from megatron_vcpo.config import PluginConfig
from megatron_vcpo.flow.base import BaseFlow, StepBatch
from megatron_vcpo.flow.policy_model import model_description, padded_vocab_size
from megatron_vcpo.flow.resume import (
    as_tensors,
    load_flow_state,
    load_reference,
    reference_path,
    save_model_files,
    save_reference,
)
from megatron_vcpo.mcore.packing import MicroBatch
from megatron_vcpo.mcore.reductions import collective_device
from megatron_vcpo.mcore.routers.state import freeze_routers
from megatron_vcpo.mcore.step.policy_step import PolicyStep, StepSettings
from megatron_vcpo.models.building.layer_spec import packed_local_spec
from megatron_vcpo.optim import EssParamScheduler, EssSettings
from megatron_vcpo.patches import (
    checkpoint_unpickling,
    distributed_optimizer_torch_adam,
    interleaved_dataloader_state,
    lost_checkpoint_manager,
    mla_direct_query,
    save_before_first_update,
    whole_tracker,
)
from megatron_vcpo.registration import equip, packing_settings
from megatron_vcpo.rollout.inputs import Inputs
from megatron_vcpo.runtime import phases
from megatron_vcpo.runtime.agreement import raise_together
from megatron_vcpo.runtime.watchdog import Watchdog

FlowFactory = Callable[[argparse.Namespace, PluginConfig, Inputs], BaseFlow]


class TrajectoryFeed:
    """The train iterator that Megatron sees, one for each model chunk: it hands out what the step has packed."""

    def __init__(self, plugin: MegatronPlugin) -> None:
        self._plugin = plugin
        self._micro_batches: Iterator[MicroBatch] = iter(())

    def fill(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Take the micro-batches of one pass."""
        self._micro_batches = micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        return next(self._micro_batches)

    def save_state(self) -> dict[str, Any] | None:
        """What a resumed run continues from; Megatron writes it beside the checkpoint of the same iteration."""
        return self._plugin.state_dict()


class MegatronPlugin:
    """VCPO inside `megatron.training.pretrain()`."""

    def __init__(self, args: argparse.Namespace, config: PluginConfig, inputs: Inputs, flow: FlowFactory) -> None:
        """Args: Megatron's checked arguments, the plugin's, what the preflight opened, and what makes minibatches."""
        self.args = args
        self.config = config
        self.inputs = inputs
        self.feeds: list[TrajectoryFeed] = []
        self.step: PolicyStep | None = None
        self.flow: BaseFlow | None = None
        self._flow_factory = flow
        self._saved_state: dict[str, Any] | None = None
        self._train_step: Callable[..., Any] | None = None
        self._save: Callable[..., None] | None = None
        self._watchdog: Watchdog | None = None

    # ------------------------------------------------------------------ seams

    def install(self) -> None:
        """Put the scheduler and the step into megatron.training; call before pretrain()."""
        from megatron.training import training

        checkpoint_unpickling.apply()
        guard.install(verify=self.config.vcpo.verify_checkpoint == "on", rollout_state=not self.args.finetune)
        save_before_first_update.apply()
        distributed_optimizer_torch_adam.apply()
        training.OptimizerParamScheduler = functools.partial(EssParamScheduler, ess=EssSettings.of(self.config.vcpo))
        self._train_step = training.train_step
        training.train_step = self.train_step
        self._save = training.save_checkpoint_and_time
        training.save_checkpoint_and_time = self.save
        interleaved_dataloader_state.apply()
        whole_tracker.apply()
        lost_checkpoint_manager.apply()

    def configure_model(self, model_config: Any) -> None:
        """Set the hooks of Megatron's GPTModelConfig: gradients' finalization, packed attention, initial weights."""
        from megatron.core.distributed import finalize_model_grads

        # gpt_config_from_args() of 0.19.2 forgets it and leaves 8; short sequences hardly show the error.
        model_config.rope_scaling_factor = self.args.rope_scaling_factor
        model_config.finalize_model_grads_func = functools.partial(self._finalize, finalize_model_grads)
        mla_direct_query.apply()
        if self.args.transformer_impl == "local":
            model_config.transformer_layer_spec = packed_local_spec
        if self.config.vcpo.freeze_router or self.config.vcpo.freeze_expert_bias:
            model_config.pre_wrap_hooks.append(self._freeze)
        if self.config.vcpo.load_hf is not None:
            # After wrapping: Float16Module rounds the router's bias, which Megatron keeps in fp32.
            model_config.post_wrap_hooks.append(self._load_hf)

    def data_provider(self, _num_samples: Any, vp_stage: int | None = None) -> tuple[TrajectoryFeed, None, None]:
        """Megatron's dataset provider; runs after the checkpoint is loaded, once for each model chunk."""
        if not self.feeds and self.args.iteration > 0:
            self._saved_state = load_flow_state(self.args)
        feed = TrajectoryFeed(self)
        self.feeds.append(feed)
        return feed, None, None

    data_provider.is_distributed = True  # type: ignore[attr-defined]  # else only one tensor-parallel rank gets a feed

    def forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Any]:
        """Megatron's forward_step_func."""
        assert self.step is not None
        return self.step.forward_step(data_iterator, model)

    def _finalize(self, stock: Callable[..., None], model: list[Any], *args: Any, **kwargs: Any) -> None:
        phases.enter("reduce gradients and statistics")
        assert self.step is not None
        self.step.settle(model)
        stock(model, *args, **kwargs)
        self.step.finalize(model)
        phases.enter("update parameters")

    def _load_hf(self, model_chunks: list[nn.Module]) -> list[nn.Module]:
        from megatron.core.process_groups_config import ProcessGroupCollection

        from megatron_vcpo.checkpoint.load_hf import load_hf_checkpoint

        description = model_description(self.args, self.config, self.inputs, model_chunks)
        shape = description.shape(padded_vocab_size(model_chunks, description.tied_embeddings))
        groups = ProcessGroupCollection.use_mpu_process_groups()
        load_hf_checkpoint(model_chunks, description.family, shape, str(self.config.vcpo.load_hf), groups)
        return model_chunks

    def _freeze(self, model_chunks: list[nn.Module]) -> list[nn.Module]:
        vcpo = self.config.vcpo
        freeze_routers(model_chunks, weights=vcpo.freeze_router, expert_bias=vcpo.freeze_expert_bias)
        return model_chunks

    # ------------------------------------------------------------------ one iteration

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap Megatron's train_step: make a minibatch before it, take its metrics after it."""
        assert self._train_step is not None
        bound = inspect.signature(self._train_step).bind(*args, **kwargs)  # by name: survives added parameters
        call = bound.arguments
        model, schedule = call["model"], call["forward_backward_func"]
        if self.step is None:
            self._start(model, call["optimizer"], call["opt_param_scheduler"])
        assert self.step is not None
        assert self.flow is not None
        phases.enter("take a minibatch", iteration=self.args.curr_iteration + 1)
        batch = self.flow.next_minibatch(model=model, step=self.step, forward_backward=schedule)
        with self.flow.timer("train"):
            result, metrics, success = self._attempt(bound, batch, schedule)
            while self.step.repeat:
                self.flow.count("repeated_steps", 1)
                self.flow.say(
                    f"iteration {self.args.curr_iteration + 1} is made again without {len(self.step.excluded)} of "
                    f"{len(batch.trajectories)} trajectories, which are not finite under the policy."
                )
                result, metrics, success = self._attempt(bound, batch, schedule)
        batch.excluded = self.step.excluded
        metrics["overflow"] = float(self.args.fp16 and not success and not self.step.skip_reason)
        if self.step.skip_reason:
            self.flow.say(f"iteration {self.args.curr_iteration + 1} was skipped: {self.step.skip_reason}.")
        self.flow.after_step(metrics, batch=batch, success=success, model=model)
        phases.enter("log and save")
        return result

    def _attempt(
        self, bound: inspect.BoundArguments, batch: StepBatch, schedule: Callable[..., Any]
    ) -> tuple[Any, dict[str, float], bool]:
        """Megatron's train_step on a minibatch: what it returned, the step's metrics, whether parameters changed."""
        assert self.step is not None
        assert self._train_step is not None
        call, step = bound.arguments, self.step
        phases.enter("score")
        step.begin(batch.trajectories, model=call["model"], forward_backward=schedule, lag=batch.lag_max)
        for feed in self.feeds:
            feed.fill(step.data_iterator())
        # Megatron's own calculator stays at the nominal number: train() asserts that it never falls.
        actual = {
            "num_microbatches": step.num_micro_batches,
            "seq_length": step.sequence_length,
            "decoder_seq_length": step.sequence_length,
        }
        call["forward_backward_func"] = lambda **options: schedule(**{**options, **actual})
        success, grad_norm = False, None
        phases.enter("forward and backward")
        try:
            result = self._train_step(*bound.args, **bound.kwargs)
            success, grad_norm = not result[1], result[5]
        finally:
            metrics = step.end(success=success, grad_norm=grad_norm)
        return result, metrics, success

    def save(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Wrap Megatron's save_checkpoint_and_time: save what was trained, and write over no complete checkpoint."""
        assert self._save is not None
        if self.step is None:  # no step was taken: what was loaded would be written again, in its place
            return
        if not kwargs.get("non_persistent_ckpt"):
            failure: OSError | None = None
            if self.args.rank == 0:
                try:
                    set_aside(self.args, iteration)
                except OSError as error:
                    failure = error
            raise_together(failure)
        self._save(iteration, *args, **kwargs)

    def _start(self, model: list[Any], optimizer: Any, scheduler: EssParamScheduler) -> None:
        from megatron.core.utils import get_model_config

        if not isinstance(scheduler, EssParamScheduler):
            raise TypeError(
                f"The scheduler is a {type(scheduler).__name__}, not an EssParamScheduler: install() came too late."
            )
        self._watch()
        if self.args.save is not None:
            save_model_files(self.args, get_model_config(model[0]), self.inputs.files)
        self.flow = self._flow_factory(self.args, self.config, self.inputs)
        if self._saved_state is not None:
            self.flow.load_state_dict(self._saved_state)
            self._saved_state = None
        self.flow.start(model=model, optimizer=optimizer)
        self.step = PolicyStep(
            self.config.vcpo,
            StepSettings(
                vocab_size=self.inputs.vocab_size,
                temperature=self.config.rollout.temperature,
                max_response_length=self.config.rollout.max_response_length,
                packing=packing_settings(get_model_config(model[0]), self.flow.groups, self.token_budget),
                sequence_length=self.args.seq_length,
                fp16=self.args.fp16,
            ),
            groups=self.flow.groups,
            scheduler=scheduler,
            device=collective_device(),
        )
        equip(self.step, model, optimizer, router_replay=self.config.rollout.router_replay != "off")
        if self.step.reference is not None:
            if self.args.iteration > 0:
                load_reference(self.step.reference, reference_path(self.args, self.args.load))
            if self.args.save is not None and (self.args.iteration == 0 or self.args.save != self.args.load):
                save_reference(self.step.reference, reference_path(self.args, self.args.save))

    def _watch(self) -> None:
        if self.config.vcpo.phase_deadline and self.args.world_size > 1:
            self._watchdog = Watchdog(
                torch.distributed.distributed_c10d._get_default_store(),
                rank=self.args.rank,
                world_size=self.args.world_size,
                deadline=self.config.vcpo.phase_deadline,
            )
            self._watchdog.start()

    def explain(self, error: BaseException) -> str | None:
        """Where this process failed, and who was elsewhere; None where a run of one process says it all by itself."""
        return None if self._watchdog is None else self._watchdog.explain(error)

    @property
    def token_budget(self) -> int:
        """Tokens of one micro-batch."""
        return int(self.config.vcpo.tokens_per_micro_batch or self.args.seq_length)

    def state_dict(self) -> dict[str, Any] | None:
        """The flow's state; all data-parallel ranks hold the same, so the first one's is enough."""
        if self.flow is None:
            return None
        return as_tensors(self.flow.state_dict()) if torch.distributed.get_rank(self.flow.groups.dp) == 0 else None

    def close(self) -> None:
        """End the watch, the engine, the reward processes and the logs."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self.flow is not None:
            self.flow.close()
