"""Experts see rows dispatched to them, also from other ranks, so the owners' indices are dispatched the same way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_vcpo.mcore.energies.collector import EnergyCollector
from megatron_vcpo.mcore.energies.rows import Rows
from megatron_vcpo.mcore.energies.rules import Undo, shadow


def moe_layer(collector: EnergyCollector, name: str, module: Any, undo: Undo) -> None:
    """Dispatch the owners along with the hidden states, and tell each expert the owners of its rows."""

    def wrap(base: Any) -> Callable[..., Any]:
        def dispatch_preprocess(hidden: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
            if torch.is_grad_enabled() and collector.current is not None:
                count = hidden.numel() // hidden.size(-1)
                collector.dispatched = dispatched_rows(
                    module.token_dispatcher, collector.rows(count), hidden.shape[:2], routing_map, probs
                )
            return base(hidden, routing_map, probs)

        return dispatch_preprocess

    shadow(undo, module.token_dispatcher, "dispatch_preprocess", wrap)
    for position, expert in enumerate(getattr(module.experts, "local_experts", [])):
        undo.append(expert.register_forward_pre_hook(_enter(collector, position)).remove)
        undo.append(expert.register_forward_hook(lambda *_: collector.leave()).remove)


def _enter(collector: EnergyCollector, position: int) -> Callable[..., None]:
    def enter(*_: Any) -> None:
        rows = collector.dispatched[position] if torch.is_grad_enabled() and collector.current is not None else None
        collector.enter(collector.current, rows)

    return enter


@torch.no_grad()
def dispatched_rows(dispatcher: Any, rows: Rows, shape: torch.Size, routing_map: Tensor, probs: Tensor) -> list[Rows]:
    """Owners of the rows that each local expert receives; collective over the ranks that dispatch to each other.

    Args:
        dispatcher: the layer's dispatcher; a shallow copy of it sends one column of numbers.
        rows: owners of this rank's rows before the dispatch.
        shape: of the hidden states, [s, b].
        routing_map: [t, experts] bool.
        probs: [t, experts].
    """
    courier = copy.copy(dispatcher)
    vars(courier).pop("dispatch_preprocess", None)
    courier.shared_experts = None
    courier.config = copy.copy(dispatcher.config)
    courier.config.moe_permute_fusion = False  # the fused kernels need wider rows; the order is the same
    column = torch.from_numpy(rows.ids).to(probs.device, torch.float32).view(*shape, 1)  # exact up to 2^24
    sent = courier.token_dispatch(*courier.dispatch_preprocess(column, routing_map, probs.detach()))
    received, counts, _ = courier.dispatch_postprocess(*sent)
    ids = received.flatten().long().cpu()
    return [Rows(ids=part.numpy(), device=rows.device) for part in ids.split(counts.tolist())]
