"""Routers that keep still: frozen weights, frozen expert biases, and biases put back after a skipped step."""

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


def _routers(model: Sequence[Any]) -> Iterator[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    for chunk in model:
        yield from (module for module in chunk.modules() if isinstance(module, TopKRouter))
