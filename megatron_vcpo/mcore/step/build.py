"""The one place where a PolicyStep is built for a model and an optimizer, whatever loop drives it."""

from __future__ import annotations

import types
from typing import Any

import torch

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.mcore.energies.gradients import exact_energies
from megatron_vcpo.mcore.packed_minibatch import PackingSettings
from megatron_vcpo.mcore.packing import RowAlignment
from megatron_vcpo.mcore.reductions import collective_device
from megatron_vcpo.mcore.reference import ReferencePolicy
from megatron_vcpo.mcore.routers.replay import RouterReplay
from megatron_vcpo.mcore.step.policy_step import PolicyStep, StepSettings
from megatron_vcpo.optim import EssParamScheduler
from megatron_vcpo.patches import shared_loss_scale
from megatron_vcpo.runtime.agreement import raise_together


def build_step(
    config: VCPOConfig,
    *,
    model: list[Any],
    optimizer: Any,
    scheduler: EssParamScheduler,
    groups: Any,
    vocab_size: int,
    sequence_length: int,
    max_response_length: int,
    temperature: float,
    router_replay: bool,
) -> PolicyStep:
    """Build the step that the settings describe; it can refuse the optimizer's updates. Collective over all ranks.

    Args: those of `megatron_vcpo.register`.

    Raises:
        ConfigError: on every rank, if no gradient would reach the model.
    """
    from megatron.core.utils import get_model_config

    raise_together(_cut_graph(model))
    transformer = get_model_config(model[0])
    settings = StepSettings(
        vocab_size=vocab_size,
        temperature=temperature,
        max_response_length=max_response_length,
        packing=_packing_settings(transformer, groups, config.tokens_per_micro_batch or sequence_length),
        sequence_length=sequence_length,
        fp16=bool(transformer.fp16),
    )
    step = PolicyStep(config, settings, groups=groups, scheduler=scheduler, device=collective_device())
    _guard_optimizer(optimizer, step)
    step.energies = exact_energies(model, groups, config, step.device)
    if router_replay:
        step.replay = RouterReplay(model, groups)
    if config.kl_coefficient > 0.0:
        step.reference = ReferencePolicy(model)
    return step


def _cut_graph(model: list[Any]) -> ConfigError | None:
    """The error for frozen embeddings under full recomputation: a recomputed layer passes no gradient to its parameters
    unless its input requires one, and frozen embeddings' output does not."""
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


def _packing_settings(transformer: Any, groups: Any, budget: int) -> PackingSettings:
    """How micro-batches must be packed for this layout.

    Args:
        transformer: Megatron-Core's TransformerConfig.
        groups: process groups, with dp and cp.
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


def _guard_optimizer(optimizer: Any, step: PolicyStep) -> None:
    """Let the step refuse an update: this instance's optimizer.step() goes through step.guard()."""
    shared_loss_scale.apply(optimizer)
    original = optimizer.step
    optimizer.step = types.MethodType(lambda self: step.guard(original), optimizer)
