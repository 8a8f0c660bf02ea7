"""Routers that keep still: frozen weights, frozen expert biases, and what a step that was not taken left put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_vcpo.config import ConfigError


def freeze_routers(model: Sequence[Any], *, weights: bool, expert_bias: bool) -> int:
    """Freeze the routers of a model; before Megatron wraps it, since gradient buffers and optimizer are built then.

    Args:
        model: this rank's model chunks.
        weights: the router's weight (and bias) gets no gradient.
        expert_bias: auxiliary-loss-free balancing (--moe-router-enable-expert-bias) leaves its bias as it was loaded.

    Returns:
        Routers that were frozen; 0 on a pipeline stage without experts.

    Raises:
        ConfigError: expert biases are to be frozen and the model has none.
    """
    routers = list(_routers(model))
    for router in routers:
        if weights:
            for parameter in router.parameters():
                parameter.requires_grad_(False)
        if expert_bias:
            if not router.enable_expert_bias:
                raise ConfigError("--vcpo-freeze-expert-bias needs --moe-router-enable-expert-bias; drop it.")
            router.frozen_expert_bias = True
    return len(routers)


class ExpertBiases:
    """The expert biases of a model as they were: part of the policy's version, like its weights."""

    def __init__(self, model: Sequence[Any]) -> None:
        """Copy them; a model without any costs nothing."""
        biases = [router.expert_bias for router in _routers(model) if router.expert_bias is not None]
        self._saved = [(bias, bias.detach().clone()) for bias in biases]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back in place."""
        for bias, saved in self._saved:
            bias.copy_(saved)


class RouterLog:
    """What Megatron has logged of the routers' losses so far: every training forward adds to it."""

    def __init__(self) -> None:
        """Copy it; a model without experts has none."""
        self._saved = {name: entry.values.clone() for name, entry in _logged()}

    def restore(self) -> None:
        """Forget what passes have added since."""
        for name, entry in _logged():
            entry.values.copy_(self._saved.get(name, torch.zeros_like(entry.values)))


def _logged() -> Iterator[tuple[str, Any]]:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    yield from get_moe_metrics_tracker().metrics.items()


def _routers(model: Sequence[Any]) -> Iterator[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    for chunk in model:
        yield from (module for module in chunk.modules() if isinstance(module, TopKRouter))
