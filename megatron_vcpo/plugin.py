"""The few seams by which VCPO sits in Megatron's training loop, all of them in this file.

`MegatronPlugin` is for Megatron's own `pretrain()` (see train.py), which calls it once for each iteration; what then
happens is the loop's (flow/colocated.py). `registration.register()` is for a training loop of your own over
Megatron-Core. Both drive the same `PolicyStep`.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_vcpo.checkpoint import guard
from megatron_vcpo.checkpoint.save_folder import set_aside
from megatron_vcpo.config import PluginConfig
from megatron_vcpo.flow.feed import TrajectoryFeed
from megatron_vcpo.flow.loop import Loop
from megatron_vcpo.flow.policy_model import model_description, padded_vocab_size
from megatron_vcpo.flow.resume import (
    as_tensors,
    load_loop_state,
    load_reference,
    reference_path,
    save_model_files,
    save_reference,
)
from megatron_vcpo.flow.trainer import MegatronTrainer
from megatron_vcpo.mcore.routers.state import freeze_routers
from megatron_vcpo.mcore.step.build import build_step
from megatron_vcpo.mcore.step.policy_step import PolicyStep
from megatron_vcpo.optim import EssParamScheduler, EssSettings
from megatron_vcpo.patches import (
    checkpoint_unpickling,
    distributed_optimizer_torch_adam,
    interleaved_dataloader_state,
    lost_checkpoint_manager,
    save_before_first_update,
    whole_tracker,
)
from megatron_vcpo.rollout.inputs import Inputs
from megatron_vcpo.runtime import phases
from megatron_vcpo.runtime.agreement import raise_together
from megatron_vcpo.runtime.watchdog import Watchdog

LoopFactory = Callable[[argparse.Namespace, PluginConfig, Inputs], Loop]


class MegatronPlugin:
    """VCPO inside `megatron.training.pretrain()`."""

    def __init__(self, args: argparse.Namespace, config: PluginConfig, inputs: Inputs, loop: LoopFactory) -> None:
        """Args: Megatron's checked arguments, the plugin's, what the preflight opened, and what makes the loop."""
        self.args = args
        self.config = config
        self.inputs = inputs
        self.feeds: list[TrajectoryFeed] = []
        self.step: PolicyStep | None = None
        self.loop: Loop | None = None
        self._loop_factory = loop
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
        """Set the hooks of Megatron's GPTModelConfig: gradients' finalization, initial weights."""
        from megatron.core.distributed import finalize_model_grads

        model_config.finalize_model_grads_func = functools.partial(self._finalize, finalize_model_grads)
        if self.config.vcpo.freeze_router or self.config.vcpo.freeze_expert_bias:
            model_config.pre_wrap_hooks.append(self._freeze)
        if self.config.vcpo.load_hf is not None:
            # After wrapping: Float16Module rounds the router's bias, which Megatron keeps in fp32.
            model_config.post_wrap_hooks.append(self._load_hf)

    def data_provider(self, _num_samples: Any, vp_stage: int | None = None) -> tuple[TrajectoryFeed, None, None]:
        """Megatron's dataset provider; runs after the checkpoint is loaded, once for each model chunk."""
        if not self.feeds and self.args.iteration > 0:
            self._saved_state = load_loop_state(self.args)
        feed = TrajectoryFeed(self.state_dict)
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
        """Stand in for Megatron's train_step: one iteration of the loop, which calls Megatron's own within."""
        assert self._train_step is not None
        bound = inspect.signature(self._train_step).bind(*args, **kwargs)  # by name: survives added parameters
        if self.step is None:
            self._start(bound.arguments["model"], bound.arguments["optimizer"], bound.arguments["opt_param_scheduler"])
        assert self.step is not None
        assert self.loop is not None
        phases.enter("begin", iteration=self.args.curr_iteration + 1)
        trainer = MegatronTrainer(
            step=self.step, feeds=self.feeds, train_step=self._train_step, call=bound, journal=self.loop.journal
        )
        self.loop.iteration(trainer)
        phases.enter("log and save")
        return trainer.result

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
        self.loop = self._loop_factory(self.args, self.config, self.inputs)
        if self._saved_state is not None:
            self.loop.load_state_dict(self._saved_state)
            self._saved_state = None
        self.loop.start(model=model, optimizer=optimizer)
        rollout = self.config.rollout
        self.step = build_step(
            self.config.vcpo,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            groups=self.loop.groups,
            vocab_size=self.inputs.vocab_size,
            sequence_length=self.args.seq_length,
            max_response_length=rollout.max_response_length,
            temperature=rollout.temperature,
            router_replay=rollout.router_replay != "off",
        )
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

    def state_dict(self) -> dict[str, Any] | None:
        """The loop's state; all data-parallel ranks hold the same, so the first one's is enough."""
        if self.loop is None:
            return None
        return as_tensors(self.loop.state_dict()) if torch.distributed.get_rank(self.loop.groups.dp) == 0 else None

    def close(self) -> None:
        """End the watch, the engine, the reward processes and the logs."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self.loop is not None:
            self.loop.close()
