"""register(): VCPO in a training loop of your own over Megatron-Core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.step.build import build_step, equal_rows
from megatron_vcpo.mcore.step.policy_step import PolicyStep
from megatron_vcpo.optim import EssParamScheduler


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
    step = build_step(
        config,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        groups=groups,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        max_response_length=max_response_length,
        temperature=temperature,
        router_replay=router_replay,
    )
    _hook_finalization(transformer, step)
    return step


def _hook_finalization(transformer: Any, step: PolicyStep) -> None:
    """Run the step's reductions after the gradients' own, whatever finalize function the config already has."""
    from megatron.core.distributed import finalize_model_grads

    stock: Callable[..., None] = transformer.finalize_model_grads_func or finalize_model_grads
    transformer.finalize_model_grads_func = functools.partial(_finalize, stock, step)


def _finalize(stock: Callable[..., None], step: PolicyStep, model: list[Any], *args: Any, **kwargs: Any) -> None:
    step.settle(model)
    stock(model, *args, **kwargs)
    step.finalize(model)
