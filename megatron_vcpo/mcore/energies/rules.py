"""One rule for each kind of module with parameters: where to get its input and the gradient of its output.

Every rule hooks one module and appends to `undo` how to unhook it. It waits for the gradient of an output tensor and
keeps the input until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vcpo.mcore.energies import tied
from megatron_vcpo.mcore.energies.collector import EnergyCollector
from megatron_vcpo.mcore.energies.contributions import (
    Contribution,
    EmbeddingContribution,
    MatrixContribution,
    VectorContribution,
)

Undo = list[Callable[[], None]]


def flat(values: Tensor) -> Tensor:
    """[..., d] as [rows, d], without gradient."""
    return values.detach().reshape(-1, values.size(-1))


def gathered(values: Tensor, group: Any) -> Tensor:
    """The rows of all sequence-parallel ranks, in their order."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    return gather_from_sequence_parallel_region(values, group=group)


def shadow(undo: Undo, target: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a method of this one instance by its wrapped version."""
    setattr(target, name, wrap(getattr(target, name)))
    undo.append(lambda: delattr(target, name))


# ---------------------------------------------------------------------- linear layers


def linear(collector: EnergyCollector, name: str, module: Any, undo: Undo) -> None:
    """Column- and row-parallel linear layers, the output layer and experts: every rank has its shard and all rows."""
    kind = "expert" if module.is_expert else "linear"
    share = collector.layout.expert if module.is_expert else collector.layout.sharded
    if name.endswith("output_layer"):
        shadow(undo, module, "_forward_impl", lambda base: _output(collector, base))
    else:
        shadow(undo, module, "_forward_impl", lambda base: _matrix(collector, kind, share, base))
    if module.bias is not None:
        handle = module.register_forward_hook(lambda m, _, out: _linear_bias(collector, m, out[0]))
        undo.append(handle.remove)


def _matrix(collector: EnergyCollector, kind: str, share: Any, base: Any) -> Callable[..., Tensor]:
    def forward_impl(input: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = base(input, weight, *args, **kwargs)
        if collector.listens(out, weight):
            split = kwargs["sequence_parallel"]
            rows = collector.rows(out.numel() // out.size(-1))

            def contribution(g: Tensor) -> Contribution:
                x = gathered(input, kwargs["tp_group"]) if split else input
                return MatrixContribution(x=flat(x), g=flat(g), rows=rows, share=share)

            collector.watch(out, weight, kind, contribution)
        return out

    return forward_impl


def _output(collector: EnergyCollector, base: Any) -> Callable[..., Tensor]:
    """Like any linear layer, except that only rows that the loss reads have a gradient, the weight may be the
    embedding's, and the layer may run chunk by chunk (--vcpo-logit-chunk)."""

    def forward_impl(input: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = base(input, weight, *args, **kwargs)
        if collector.listens(out, weight):
            owners, share = collector.current, collector.layout.sharded
            assert owners is not None
            ranks = collector.layout.tp_size if kwargs["sequence_parallel"] else 1
            width = out.size(-1)  # a hook that refers to `out` would keep the logits until a garbage collection
            rows, whole = owners.next_scored(out.numel() // width, ranks)

            def contribution(g: Tensor) -> Contribution:
                x = flat(gathered(input, kwargs["tp_group"]) if kwargs["sequence_parallel"] else input)
                if collector.tied:
                    tied.output_part(collector, owners, rows, x, flat(g), first=collector.layout.tp_rank * width)
                return MatrixContribution(x=x, g=flat(g), rows=rows, share=share, whole=whole, open=owners.open)

            collector.watch(out, weight, "embedding" if collector.tied else "output", contribution)
        return out

    return forward_impl


def _linear_bias(collector: EnergyCollector, module: Any, out: Tensor) -> None:
    """The bias is added to the output, here or by the caller that takes both: its gradient is the output's, summed."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    if not collector.listens(out, module.bias):
        return
    share = collector.layout.sharded
    if isinstance(module, RowParallelLinear):
        split = module.sequence_parallel and collector.layout.tp_size > 1
        share = collector.layout.partial if split else collector.layout.replicated
    rows = collector.rows(out.numel() // out.size(-1))
    collector.watch(out, module.bias, "bias", lambda g: VectorContribution.of(flat(g), rows, share))


# ---------------------------------------------------------------------- norms


def norm(collector: EnergyCollector, name: str, module: Any, undo: Undo) -> None:
    """Layer norm and RMS norm, of hidden states or of the heads of queries and keys."""
    layout = collector.layout

    def hook(module: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if not (collector.listens(out, module.weight) or collector.listens(out, getattr(module, "bias", None))):
            return
        x, width = inputs[0], out.size(-1)
        of_heads = out.dim() == 4 and name.endswith(("q_layernorm", "k_layernorm"))  # [T, 1, heads, width]
        split = of_heads or getattr(module.weight, "sequence_parallel", False)
        share = layout.partial if split else layout.replicated
        rows = collector.rows(out.size(0) if of_heads else out.numel() // width)

        def per_row(values: Tensor) -> Tensor:
            return values.reshape(len(rows.ids), -1, width).sum(1)

        def weight_contribution(g: Tensor) -> Contribution:
            return VectorContribution.of(per_row(g * normalized(module, x.detach())), rows, share)

        collector.watch(out, module.weight, "norm", weight_contribution)
        collector.watch(
            out, getattr(module, "bias", None), "norm", lambda g: VectorContribution.of(per_row(g), rows, share)
        )

    undo.append(module.register_forward_hook(hook).remove)


def normalized(module: Any, x: Tensor, *, rms: bool | None = None) -> Tensor:
    """What the norm's weight multiplies."""
    if "RMS" in type(module).__name__ if rms is None else rms:
        return F.rms_norm(x, x.shape[-1:], None, module.eps)
    return F.layer_norm(x, x.shape[-1:], None, None, module.eps)


# ---------------------------------------------------------------------- embedding and router


def embedding(collector: EnergyCollector, name: str, module: Any, undo: Undo) -> None:
    """Word embeddings, split over the vocabulary; the graph of an energy pass begins here."""

    def hook(module: Any, _: Any, out: Tensor) -> None:
        if not torch.is_grad_enabled() or collector.current is None:
            return
        out.requires_grad_()  # nothing before it requires a gradient, since all parameters are frozen
        if not collector.listens(out, module.weight):
            return
        owners = collector.current
        layout, scattered = collector.layout, module.reduce_scatter_embeddings

        def contribution(g: Tensor) -> Contribution:
            # [T / tp, 1, d] under sequence parallelism, else [1, T, d]
            g = flat(gathered(g, module.tp_group) if scattered else g)
            if collector.tied:
                tied.embedding_part(collector, owners, g)
            return EmbeddingContribution(
                g=g,
                words=owners.tokens,
                rows=owners.rows,
                share=layout.sharded,
                first=module.vocab_start_index,
                height=module.num_embeddings_per_partition,
            )

        collector.watch(out, module.weight, "embedding", contribution)

    undo.append(module.register_forward_hook(hook).remove)


def router(collector: EnergyCollector, name: str, module: Any, undo: Undo) -> None:
    """The router's gate: on every tensor-parallel rank; under sequence parallelism each of them sees different rows."""
    layout = collector.layout
    share = layout.partial if module.config.sequence_parallel else layout.replicated

    def wrap(base: Any) -> Callable[[Tensor], Tensor]:
        def gating(input: Tensor) -> Tensor:
            logits = base(input)
            if any(collector.listens(logits, param) for param in (module.weight, module.bias)):
                rows = collector.rows(logits.numel() // logits.size(-1))

                def weight_contribution(g: Tensor) -> Contribution:
                    return MatrixContribution(x=flat(input), g=flat(g), rows=rows, share=share)

                collector.watch(logits, module.weight, "router", weight_contribution)
                collector.watch(logits, module.bias, "router", lambda g: VectorContribution.of(flat(g), rows, share))
            return logits

        return gating

    shadow(undo, module, "gating", wrap)


def shared_expert_gate(collector: EnergyCollector, name: str, module: Any, undo: Undo) -> None:
    """The gate of a shared expert, out = mlp(x) * sigmoid(x w^T): the logit's gradient follows from the output's."""
    layout = collector.layout
    share = layout.partial if module.config.sequence_parallel else layout.replicated

    def hook(module: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if not collector.listens(out, module.gate_weight):
            return
        x, value = inputs[0].detach(), out.detach()
        rows = collector.rows(out.numel() // out.size(-1))

        def contribution(g: Tensor) -> Contribution:
            closed = 1.0 - torch.sigmoid(F.linear(x, module.gate_weight.detach()))
            return MatrixContribution(x=flat(x), g=flat((g * value).sum(-1, True) * closed), rows=rows, share=share)

        collector.watch(out, module.gate_weight, "router", contribution)

    undo.append(module.register_forward_hook(hook).remove)


# ---------------------------------------------------------------------- scopes: which rows a part of the model sees


def layer_scope(collector: EnergyCollector, name: str, module: Any, undo: Undo) -> None:
    """Take a layer's micro-batch from its packed_seq_params: a recomputed layer runs while another one is current."""

    def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        owners = getattr(kwargs.get("packed_seq_params"), "energy_rows", None)
        collector.enter(owners, None if owners is None else owners.rows)

    def leave(module: Any, args: Any, out: Any) -> None:
        collector.leave()

    undo.append(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
    undo.append(module.register_forward_hook(leave).remove)
