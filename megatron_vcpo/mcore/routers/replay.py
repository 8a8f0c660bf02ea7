"""Routing replay: in the trainer's passes, a token uses the experts that it used in the engine.

It uses Megatron-Core's own hook: the router asks the object in `router.router_replay` for the top-k experts, and
computes the gates of the experts it is given from its own logits, so that gradients reach it. Megatron-Core's
`RouterReplay` class is not used: it keeps one global state for all micro-batches, but under 1F1B another micro-batch's
forward runs between a forward and its recomputation. Here the routes are attached to the micro-batch's PackedSeqParams,
which every layer receives again when it is recomputed, and each micro-batch counts which layers have read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vcpo.config import ConfigError
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.packing import MicroBatch
from megatron_vcpo.mcore.reductions import group_size

TopK = Callable[..., tuple[Tensor, Tensor]]


class ReplayError(RuntimeError):
    """Routes did not reach a router as they should have; training on would silently use wrong experts."""


@dataclass(slots=True)
class RouteSheet:
    """One micro-batch's routes on one rank, during one pass of one model chunk."""

    micro_batch: MicroBatch
    rows: Tensor  # [n] int64: the micro-batch's rows that this rank's routers see
    routes: Tensor | None  # [n, layers, k] int16 to replay, -1 where the router chooses for itself
    layers: frozenset[int]  # layers of this model chunk, numbered over the layers with experts
    record: Tensor | None = None  # [n, layers, k] int32 experts that the routers chose, -1 in layers of other ranks
    differs: Tensor | None = None  # [n] bool: in some layer the router itself would have chosen other experts
    agreement: dict[int, Tensor] = field(default_factory=dict)  # layer -> [2] rows that agree, rows replayed
    reads: dict[int, int] = field(default_factory=dict)  # layer -> how often a router read it
    gradient_reads: dict[int, int] = field(default_factory=dict)  # the same, but only reads with gradients enabled

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """The experts of a layer's tokens [n, k], given those that its router would choose."""
        self.reads[layer] = self.reads.get(layer, 0) + 1
        first = torch.is_grad_enabled() and layer not in self.gradient_reads
        if torch.is_grad_enabled():
            self.gradient_reads[layer] = self.gradient_reads.get(layer, 0) + 1
        if self.record is not None:
            self.record[:, layer] = own.to(self.record.dtype)
        if self.routes is None:
            return own
        if self.routes.size(0) != own.size(0):
            raise ReplayError(
                f"Layer {layer} (of those with experts) routes {own.size(0)} tokens of a micro-batch with routes for "
                f"{self.routes.size(0)}; --mlp-chunks-for-training and the like do not go with routing replay."
            )
        forced = self.routes[:, layer].to(own.dtype)
        known = forced[:, 0] >= 0
        if first:
            self._compare(layer, own, forced, known)
        return torch.where(known.unsqueeze(1), forced, own)

    def _compare(self, layer: int, own: Tensor, forced: Tensor, known: Tensor) -> None:
        unequal = (own.sort(1).values != forced.sort(1).values).any(1) & known
        self.differs = unequal if self.differs is None else self.differs | unequal
        replayed = known.sum()
        self.agreement[layer] = torch.stack([replayed - unequal.sum(), replayed]).double()


class _LayerSeam:
    """The object that one router asks for its experts; `sheet` is set while its layer runs."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.sheet: RouteSheet | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Replaces megatron.core's RouterReplay.get_replay_topk: ([n, k] scores, [n, k] experts)."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.sheet is None:
            return values, own
        chosen = self.sheet.choose(self.layer, own)
        return scores.gather(1, chosen), chosen

    @contextmanager
    def reading(self, sheet: RouteSheet | None) -> Iterator[None]:
        """Run a part of the layer with this sheet of a micro-batch."""
        before, self.sheet = self.sheet, sheet
        try:
            yield
        finally:
            self.sheet = before


class RouterReplay:
    """Replays and records the routes of a model's micro-batches, and checks that every layer read each of them.

    Args:
        model: Megatron's list of model chunks on this rank, wrapped or not.
        groups: ProcessGroupCollection with tp, pp and cp.

    Raises:
        ConfigError: on every rank, when the model has no layers with experts, or its routers bypass the seam.
    """

    def __init__(self, model: Sequence[Any], groups: Any) -> None:
        from megatron.core.utils import get_model_config

        self.groups = groups
        self.config = get_model_config(model[0])
        refuse_unreplayable(self.config)
        self.finished: list[RouteSheet] = []  # sheets of the last pass
        self._sheets: list[RouteSheet] = []
        self._recording = False
        self._off = False
        found = [list(_expert_layers(chunk)) for chunk in model]
        numbers = _all_numbers([layer.layer_number for layers in found for layer in layers], groups.pp)
        if not numbers:
            raise ConfigError("--rollout-router-replay needs a model with experts (--num-experts); this one has none.")
        self.layer_numbers = numbers  # place in the model of each layer with experts, counted from 1
        self._layers: dict[int, frozenset[int]] = {}  # id of a chunk -> its layers with experts
        for chunk, layers in zip(model, found):
            indices = [numbers.index(layer.layer_number) for layer in layers]
            self._layers[id(chunk)] = frozenset(indices)
            for layer, index in zip(layers, indices):
                _install(layer, _LayerSeam(index))

    @property
    def num_layers(self) -> int:
        """Number of layers with experts, over all pipeline stages."""
        return len(self.layer_numbers)

    # ------------------------------------------------------------------ one pass

    def require_routes(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise ReplayError, naming the trajectory, if one carries no routes."""
        for trajectory in trajectories:
            if trajectory.routed_experts is None:
                raise ReplayError(
                    f"{trajectory.name} carries no routes to replay (it may have been saved by a run without "
                    "--rollout-router-replay); set the flag to off, or start with --finetune and an empty buffer."
                )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run passes in which every router chooses for itself."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run forward-only passes whose routers choose for themselves and record their choice in the sheets."""
        with self.suspended():
            self._recording = True
            try:
                yield
            finally:
                self._recording = False

    def attach(self, packed: Any, micro_batch: MicroBatch, model: Any) -> None:
        """Attach a micro-batch's routes to its PackedSeqParams for one chunk's forward.

        Args:
            packed: Megatron-Core's PackedSeqParams, used for this call only.
            micro_batch: the model's input.
            model: the chunk that will read it.

        Raises:
            ReplayError: the routes are those of another model.
        """
        rows = self._rank_rows(micro_batch)
        routes = None if self._off else micro_batch.routes
        shape = (self.num_layers, self.config.moe_router_topk)
        if routes is not None and routes.shape[1:] != shape:
            raise ReplayError(
                f"The trajectories' routes name {routes.size(2)} experts in {routes.size(1)} layers, the model routes "
                f"to {shape[1]} in {shape[0]}: the engine runs another model (--vcpo-load-hf)."
            )
        sheet = RouteSheet(
            micro_batch=micro_batch,
            rows=rows,
            routes=None if routes is None else routes[rows],
            layers=self._layers[id(model)],
        )
        if self._recording:
            sheet.record = torch.full((len(rows), *shape), -1, dtype=torch.int32, device=rows.device)
        packed.route_sheet = sheet
        self._sheets.append(sheet)

    def _rank_rows(self, micro_batch: MicroBatch) -> Tensor:
        """The rows that this rank's routers see: those of its context-parallel rank or, under sequence parallelism, its
        share of them."""
        if micro_batch.context_rows is None:
            rows = torch.arange(micro_batch.num_rows, device=micro_batch.tokens.device)
        else:
            rows = micro_batch.context_rows[dist.get_rank(self.groups.cp)]
        if not self.config.sequence_parallel:
            return rows
        return rows.view(group_size(self.groups.tp), -1)[dist.get_rank(self.groups.tp)]

    def finish_pass(self, *, training: bool) -> list[RouteSheet]:
        """Check a finished pass: every layer read every micro-batch and, in training, passed its gradient once.

        Returns:
            The sheets of the pass, in the order of the forward calls; also kept in `finished` until the next pass.

        Raises:
            ReplayError: a layer did not; the layer and the micro-batch are named.
        """
        sheets, self._sheets = self._sheets, []
        self.finished = sheets
        for number, sheet in enumerate(sheets):
            for layer in sorted(sheet.layers):
                reads, gradients = sheet.reads.get(layer, 0), sheet.gradient_reads.get(layer, 0)
                if reads < 1 or gradients != int(training):
                    raise ReplayError(
                        f"Layer {layer} (of those with experts) read the routes of micro-batch {number} {reads} times, "
                        f"{gradients} of them with a gradient where {int(training)} is right: Megatron ran it by a "
                        "path that routing replay does not know; set --rollout-router-replay off and report the flags."
                    )
        return sheets


def _expert_layers(chunk: Any) -> Iterator[Any]:
    """Transformer layers of a model chunk with a mixture of experts, except those of multi-token-prediction heads."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for module in chunk.modules():
        with_experts = isinstance(module, TransformerLayer) and isinstance(module.mlp, MoELayer)
        if with_experts and not module.mlp.router.is_mtp_layer:
            yield module


def _all_numbers(own: list[int], pp_group: Any) -> list[int]:
    """Numbers of the layers with experts on all pipeline stages, in order; one small exchange at the start."""
    if group_size(pp_group) == 1:
        return sorted(own)
    stages: list[Any] = [None] * group_size(pp_group)
    dist.all_gather_object(stages, own, group=pp_group)
    return sorted(number for stage in stages for number in stage)


def _install(layer: Any, seam: _LayerSeam) -> None:
    """Give a layer's router the seam, and the seam the sheet of each micro-batch that the layer is called with."""
    layer.mlp.router.router_replay = seam

    def enter(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seam.sheet = getattr(kwargs.get("packed_seq_params"), "route_sheet", None)

    def leave(*_: Any) -> None:
        seam.sheet = None

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(leave, always_call=True)
    if layer.mlp.moe_layer_recompute:
        _bind_recomputation(layer.mlp, seam)


def _bind_recomputation(moe: Any, seam: _LayerSeam) -> None:
    """--recompute-modules moe recomputes only the MoE layer, which gets no PackedSeqParams: bind the sheet to it."""
    from megatron.core import tensor_parallel

    stock = moe.forward
    moe.moe_layer_recompute = False

    def forward(hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None) -> Any:
        if not moe.training:
            return stock(hidden_states, intermediate_tensors, padding_mask)
        sheet = seam.sheet

        def bound(hidden: Tensor, mask: Tensor | None) -> Any:
            with seam.reading(sheet):
                return stock(hidden, None, mask)

        return tensor_parallel.checkpoint(bound, False, hidden_states, padding_mask)

    moe.forward = forward


def refuse_unreplayable(config: Any) -> None:
    """Raise ConfigError on settings under which routers choose experts without asking `router_replay`.

    Args:
        config: TransformerConfig, or Megatron's arguments: the names are the same.
    """
    conflicts = {
        "--moe-router-fusion": getattr(config, "moe_router_fusion", False),
        "--moe-router-load-balancing-type sinkhorn": "sinkhorn" in config.moe_router_load_balancing_type,
        "--moe-router-load-balancing-type quantile_balancing": (
            "quantile_balancing" in config.moe_router_load_balancing_type
        ),
        "--moe-expert-capacity-factor": config.moe_expert_capacity_factor is not None,
        "--moe-router-force-load-balancing": getattr(config, "moe_router_force_load_balancing", False),
        "--overlap-moe-expert-parallel-comm": getattr(config, "overlap_moe_expert_parallel_comm", False),
        "--moe-enable-routing-replay": getattr(config, "moe_enable_routing_replay", False),
        "--mlp-chunks-for-training": getattr(config, "mlp_chunks_for_training", 1) > 1,
        "--cuda-graph-impl": getattr(config, "cuda_graph_impl", "none") not in ("none", None),
        "--fp8-format with --recompute-modules moe": bool(
            getattr(config, "fp8", None) and "moe" in (getattr(config, "recompute_modules", None) or ())
        ),
    }
    found = [flag for flag, present in conflicts.items() if present]
    if found:
        raise ConfigError(f"--rollout-router-replay does not go with {', '.join(found)}; drop one of the two.")
