"""register(): VCPO in a training loop of your own over Megatron-Core."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.mcore.energies.gradients import exact_energies
from megatron_vcpo.mcore.minibatch import PackingSettings
from megatron_vcpo.mcore.packing import RowAlignment
from megatron_vcpo.mcore.reductions import collective_device
from megatron_vcpo.mcore.reference import ReferencePolicy
from megatron_vcpo.mcore.routers.replay import RouterReplay
from megatron_vcpo.mcore.step.policy_step import PolicyStep, StepSettings
from megatron_vcpo.optim import EssParamScheduler
from megatron_vcpo.patches import shared_loss_scale
from megatron_vcpo.runtime.agreement import raise_together


def register(
    config: VCPOConfig,
    *,
    model: list[Any],
    optimizer: Any,
    scheduler: EssParamScheduler,
    groups: Any,
    vocab_size: int,
    sequence_length: int,
    max_response_length: int,
    temperature: float = 1.0,
    router_replay: bool = False,
) -> PolicyStep:
    """Hook VCPO into a model and an optimizer and return the step that drives them.

    Args:
        config: the objective.
        model: Megatron's list of model chunks, wrapped in its DistributedDataParallel; the transformer config has
            calculate_per_token_loss and variable_seq_lengths set.
        optimizer: Megatron's; its step() will refuse an update that is not fit to be made: (False, None, None).
        scheduler: an EssParamScheduler over the same optimizer.
        groups: ProcessGroupCollection with tp, pp, cp, dp, dp_cp.
        vocab_size: real tokens, without padding.
        sequence_length: longest trajectory; also the token budget of a micro-batch where the config sets none. Tokens.
        max_response_length: bound of a response. Tokens.
        temperature: of the rollouts.
        router_replay: every trajectory carries `routed_experts`, and the model's routers follow them.

    Example:
        >>> vcpo = megatron_vcpo.register(VCPOConfig(), model=model, optimizer=optimizer, scheduler=scheduler,
        ...                               groups=groups, vocab_size=32000, sequence_length=4096,
        ...                               max_response_length=2048)
        >>> for trajectories in my_rollouts():  # the same list on every rank
        ...     repeat = True
        ...     while repeat:  # once more where a trajectory turns out not to be finite: then without it
        ...         vcpo.begin(trajectories, model=model, forward_backward=forward_backward)
        ...         for chunk in model:
        ...             chunk.zero_grad_buffer()
        ...         optimizer.zero_grad()
        ...         forward_backward(forward_step_func=vcpo.forward_step, data_iterator=vcpo.data_iterator(),
        ...                          model=model, num_microbatches=vcpo.num_micro_batches, seq_length=4096,
        ...                          micro_batch_size=1, forward_only=False)
        ...         success, grad_norm, _ = optimizer.step()
        ...         if success:
        ...             scheduler.step(len(trajectories))
        ...         metrics = vcpo.end(success=success, grad_norm=grad_norm)
        ...         repeat = vcpo.repeat
    """
    from megatron.core.utils import get_model_config

    transformer = get_model_config(model[0])
    variable = not equal_rows(transformer)
    if not transformer.calculate_per_token_loss or transformer.variable_seq_lengths != variable:
        raise ValueError(
            f"The transformer config needs calculate_per_token_loss=True and variable_seq_lengths={variable}."
        )
    settings = StepSettings(
        vocab_size=vocab_size,
        temperature=temperature,
        max_response_length=max_response_length,
        packing=packing_settings(transformer, groups, config.tokens_per_micro_batch or sequence_length),
        sequence_length=sequence_length,
        fp16=bool(transformer.fp16),
    )
    step = PolicyStep(config, settings, groups=groups, scheduler=scheduler, device=collective_device())
    equip(step, model, optimizer, router_replay=router_replay)
    hook_finalization(transformer, step)
    return step


def equip(step: PolicyStep, model: list[Any], optimizer: Any, *, router_replay: bool) -> None:
    """Give a step what its settings ask for, and let it refuse the optimizer's updates; collective over all ranks."""
    raise_together(_cut_graph(model))
    guard_optimizer(optimizer, step)
    step.energies = exact_energies(model, step.groups, step.config, step.device)
    if router_replay:
        step.replay = RouterReplay(model, step.groups)
    if step.config.kl_coefficient > 0.0:
        step.reference = ReferencePolicy(model)


def _cut_graph(model: list[Any]) -> ConfigError | None:
    """A recomputed layer passes gradients on only where its input has one, and frozen embeddings give it none."""
    from megatron.core.utils import get_model_config

    if get_model_config(model[0]).recompute_granularity != "full":
        return None
    for chunk in model:
        trained = {name: param.requires_grad for name, param in chunk.named_parameters()}
        embeddings = [on for name, on in trained.items() if "embedding.word_embeddings." in name]
        if embeddings and not any(embeddings) and any(trained.values()):
            return ConfigError(
                "The word embeddings are frozen, and under --recompute-granularity full the layers above them would "
                "then get no gradient, without a word from Megatron: train them, or recompute selectively."
            )
    return None


def packing_settings(transformer: Any, groups: Any, budget: int) -> PackingSettings:
    """How this layout wants its micro-batches.

    Args:
        transformer: Megatron-Core's TransformerConfig.
        groups: process groups, dp and cp in them.
        budget: tokens of one micro-batch.
    """
    interleaved = transformer.virtual_pipeline_model_parallel_size is not None
    return PackingSettings(
        budget=budget,
        alignment=RowAlignment(
            cp_rank=torch.distributed.get_rank(groups.cp),
            cp_size=torch.distributed.get_world_size(groups.cp),
            token_multiple=transformer.tensor_model_parallel_size if transformer.sequence_parallel else 1,
            equal_rows=equal_rows(transformer),
        ),
        micro_batch_multiple=transformer.pipeline_model_parallel_size if interleaved else 1,
        dp_rank=torch.distributed.get_rank(groups.dp),
        dp_size=torch.distributed.get_world_size(groups.dp),
    )


def equal_rows(transformer: Any) -> bool:
    """Whether all micro-batches of a step need the same number of rows: the allgather dispatcher gathers tokens of
    expert-parallel ranks into one tensor."""
    return bool(transformer.num_moe_experts) and transformer.moe_token_dispatcher_type == "allgather"


def hook_finalization(transformer: Any, step: PolicyStep) -> None:
    """Run the step's reductions after the gradients' own, whatever finalize function the config already has."""
    from megatron.core.distributed import finalize_model_grads

    stock: Callable[..., None] = transformer.finalize_model_grads_func or finalize_model_grads
    transformer.finalize_model_grads_func = functools.partial(_finalize, stock, step)


def _finalize(stock: Callable[..., None], step: PolicyStep, model: list[Any], *args: Any, **kwargs: Any) -> None:
    step.settle(model)
    stock(model, *args, **kwargs)
    step.finalize(model)


def guard_optimizer(optimizer: Any, step: PolicyStep) -> None:
    """Let the step refuse an update: optimizer.step() of this one instance asks it first."""
    shared_loss_scale.apply(optimizer)
    original = optimizer.step
    optimizer.step = types.MethodType(lambda self: step.guard(original), optimizer)
