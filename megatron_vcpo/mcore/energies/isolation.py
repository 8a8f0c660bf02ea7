"""Run extra backward passes without side effects on the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_vcpo.mcore.routers.state import RouterLog

_CHANGED = ("grad_sync_func", "no_sync_func", "moe_grad_scale_func", "finalize_model_grads_func")


@contextmanager
def energy_schedule(config: Any, *, finalize: bool) -> Iterator[None]:
    """Let Megatron's schedule run a backward with frozen parameters: no gradient synchronization, no auxiliary losses.

    The loss scale stays because half precision needs it; the energies are divided by the scale that was applied.

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
    """Disable the hook that finalizes gradients, for a pass of the schedule that runs inside that hook."""
    before, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    try:
        yield
    finally:
        config.finalize_model_grads_func = before


@contextmanager
def router_statistics_kept(model: list[Any]) -> Iterator[None]:
    """Restore, on exit, the counters that routers change in every training forward and Megatron's log of their losses.

    Otherwise a pass in addition to the step's own would count every token twice.
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
