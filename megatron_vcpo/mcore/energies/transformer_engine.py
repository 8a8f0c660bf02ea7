"""The rules of Transformer Engine's layers, which hide their communication: only inputs and outputs are visible.

Parameters and attributes as in megatron.core.extensions.transformer_engine 0.19.2 and Transformer Engine 2. A layer
with frozen weights computes no weight gradient; the hook keeps the input instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vcpo.mcore.energies.collector import EnergyCollector
from megatron_vcpo.mcore.energies.contributions import (
    Contribution,
    MatrixContribution,
    Share,
    VectorContribution,
    working,
)
from megatron_vcpo.mcore.energies.rules import Undo, flat, gathered, normalized


def te_linear(collector: EnergyCollector, name: str, module: Any, undo: Undo) -> None:
    """TELinear and its column- and row-parallel forms, including experts that run one by one."""

    def hook(module: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> None:
        out, x, layout = outputs[0], inputs[0], collector.layout
        if not (collector.listens(out, module.weight) or collector.listens(out, module.bias)):
            return
        expert, mode = ".local_experts." in name, module.parallel_mode
        split = module.sequence_parallel and layout.tp_size > 1 and not expert
        share = layout.expert if expert else layout.sharded
        if mode is None and not expert:  # duplicated: Transformer Engine assumes one rank, but Megatron marks it
            split = getattr(module.weight, "sequence_parallel", False) and layout.tp_size > 1
            share = layout.partial if split else layout.replicated
        whole_x, whole_g = split and mode == "column", split and mode == "row"
        rows = collector.rows(_rows(x) * layout.tp_size if whole_x else _rows(x))

        def weight_contribution(g: Tensor) -> Contribution:
            return MatrixContribution(
                x=flat(gathered(x, layout.tp) if whole_x else x),
                g=flat(gathered(g, layout.tp) if whole_g else g),
                rows=rows,
                share=share,
            )

        collector.watch(out, module.weight, "expert" if expert else "linear", weight_contribution)
        bias_share = (layout.partial if split else layout.replicated) if mode == "row" else share
        bias_rows = collector.rows(_rows(out))
        collector.watch(out, module.bias, "bias", lambda g: VectorContribution.of(flat(g), bias_rows, bias_share))

    undo.append(module.register_forward_hook(hook).remove)


def te_layer_norm_linear(collector: EnergyCollector, name: str, module: Any, undo: Undo) -> None:
    """TELayerNormColumnParallelLinear: both the normalized input and its gradient are recomputed."""

    def hook(module: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> None:
        out, layout = outputs[0], collector.layout
        parameters = (module.weight, module.bias, module.layer_norm_weight, module.layer_norm_bias)
        if not any(collector.listens(out, param) for param in parameters):
            return
        x, split = inputs[0].detach(), module.sequence_parallel and layout.tp_size > 1
        rows = collector.rows(_rows(out))

        def unit() -> Tensor:
            values = normalized(module, x, rms=module.normalization == "RMSNorm")
            return flat(gathered(values, layout.tp) if split else values)

        def weight_contribution(g: Tensor) -> Contribution:
            scale = module.layer_norm_weight.detach() + (1.0 if module.zero_centered_gamma else 0.0)
            values = unit() * scale.to(x.dtype)
            if module.layer_norm_bias is not None:
                values = values + module.layer_norm_bias.detach().to(x.dtype)
            return MatrixContribution(x=values, g=flat(g), rows=rows, share=layout.sharded)

        def norm_contribution(factor: Any, g: Tensor) -> Contribution:
            grad, weight = working(flat(g), module.weight.detach())
            values = grad @ weight  # from this rank's outputs: part of the gradient of the normalized input
            values = values * factor() if factor is not None else values
            contribution = VectorContribution.of(values, rows, layout.partial)
            if split or layout.tp_size == 1:
                return contribution
            # Without sequence parallelism Megatron expects the whole gradient on every rank.
            dist.all_reduce(contribution.sums, group=layout.tp)
            return VectorContribution(sums=contribution.sums, rows=rows, share=layout.replicated)

        collector.watch(out, module.weight, "linear", weight_contribution)
        collector.watch(out, module.layer_norm_weight, "norm", lambda g: norm_contribution(unit, g))
        collector.watch(out, module.layer_norm_bias, "norm", lambda g: norm_contribution(None, g))
        collector.watch(out, module.bias, "bias", lambda g: VectorContribution.of(flat(g), rows, layout.sharded))

    undo.append(module.register_forward_hook(hook).remove)


def te_grouped_linear(collector: EnergyCollector, name: str, module: Any, undo: Undo) -> None:
    """TEGroupedLinear: the weights of all local experts, `weight0` and so on, over rows sorted by expert."""

    def hook(module: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Any]) -> None:
        out, (x, splits) = outputs[0], inputs[:2]
        start, share = 0, collector.layout.expert
        counts = splits.tolist() if torch.is_tensor(splits) else list(splits)
        for position, count in enumerate(counts):
            weight = getattr(module, f"weight{position}")
            if collector.listens(out, weight):
                span = slice(start, start + count)
                collector.watch(out, weight, "expert", _expert(x, span, collector.dispatched[position], share))
            start += count

    undo.append(module.register_forward_hook(hook).remove)


def _expert(x: Tensor, span: slice, rows: Any, share: Share) -> Any:
    return lambda g: MatrixContribution(x=flat(x)[span], g=flat(g)[span], rows=rows, share=share)


def _rows(values: Tensor) -> int:
    return values.numel() // values.size(-1)


def te_rules() -> list[tuple[type, Any, tuple[str, ...]]]:
    """(type of module, its rule, its parameters), the first match applies; empty without Transformer Engine."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        return []
    import transformer_engine as te
    from megatron.core.extensions import transformer_engine as extensions

    from megatron_vcpo.mcore.energies.rules import norm

    both = ("weight", "bias")
    weights = tuple(f"weight{i}" for i in range(1024))
    return [
        (
            extensions.TELayerNormColumnParallelLinear,
            te_layer_norm_linear,
            (*both, "layer_norm_weight", "layer_norm_bias"),
        ),
        (extensions.TEGroupedLinear, te_grouped_linear, weights),
        (extensions.TELinear, te_linear, both),
        (te.pytorch.RMSNorm, norm, ("weight",)),
        (te.pytorch.LayerNorm, norm, both),
    ]
