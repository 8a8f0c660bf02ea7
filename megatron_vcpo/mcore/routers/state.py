"""Router state that must not change: frozen weights and biases, and what a step that was not taken must undo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_vcpo.config import ConfigError


def freeze_routers(model: Sequence[Any], *, weights: bool, expert_bias: bool) -> int:
    """Freeze the routers of a model. Call it before Megatron wraps the model and builds gradient buffers and optimizer.

    Args:
        model: this rank's model chunks.
        weights: the router's weight (and bias) gets no gradient.
        expert_bias: auxiliary-loss-free balancing (--moe-router-enable-expert-bias) does not change the bias that was
            loaded.

    Returns:
        Number of routers frozen; 0 on a pipeline stage without experts.

    Raises:
        ConfigError: `expert_bias` is set, but the model has no expert biases.
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
    """A copy of a model's expert biases, which are part of the policy's version like its weights."""

    def __init__(self, model: Sequence[Any]) -> None:
        """Copy the biases; costs nothing for a model without any."""
        biases = [router.expert_bias for router in _routers(model) if router.expert_bias is not None]
        self._saved = [(bias, bias.detach().clone()) for bias in biases]

    @torch.no_grad()
    def restore(self) -> None:
        """Copy them back into the model."""
        for bias, saved in self._saved:
            bias.copy_(saved)


class RouterLog:
    """A copy of Megatron's log of the routers' losses, to which every training forward adds."""

    def __init__(self) -> None:
        """Copy the log; it is empty for a model without experts."""
        self._saved = {name: entry.values.clone() for name, entry in _logged()}

    def restore(self) -> None:
        """Drop what passes have added since."""
        for name, entry in _logged():
            entry.values.copy_(self._saved.get(name, torch.zeros_like(entry.values)))


def _logged() -> Iterator[tuple[str, Any]]:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    yield from get_moe_metrics_tracker().metrics.items()


def _routers(model: Sequence[Any]) -> Iterator[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    for chunk in model:
        yield from (module for module in chunk.modules() if isinstance(module, TopKRouter))
