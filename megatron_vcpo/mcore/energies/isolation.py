"""Backward passes that leave no trace but what they are made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_vcpo.mcore.routers.state import RouterLog

_CHANGED = ("grad_sync_func", "no_sync_func", "moe_grad_scale_func", "finalize_model_grads_func")


@contextmanager
def energy_schedule(config: Any, *, finalize: bool) -> Iterator[None]:
    """Let Megatron's schedule run a backward with frozen parameters: no gradients to synchronize, no auxiliary losses.

    The loss scale stays, for half precision needs it; energies are divided by what it really was.

    Args:
        config: the transformer config that the schedule reads.
        finalize: keep the hook that finalizes gradients.
    """
    before = {name: getattr(config, name, None) for name in _CHANGED}
    config.grad_sync_func = config.no_sync_func = None
    config.moe_grad_scale_func = lambda: torch.zeros(1)
    if not finalize:
        config.finalize_model_grads_func = None
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@contextmanager
def silent_finalization(config: Any) -> Iterator[None]:
    """A pass of the schedule within the finalization of another."""
    before, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    try:
        yield
    finally:
        config.finalize_model_grads_func = before


@contextmanager
def router_statistics_kept(model: list[Any]) -> Iterator[None]:
    """Counters that routers move in every training forward, and Megatron's log of their losses, as they were before.

    A pass more than the step's own would count every token twice.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    routers = [module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)]
    buffers = [(buffer, buffer.clone()) for router in routers for buffer in router.buffers()]
    log = RouterLog()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        log.restore()
