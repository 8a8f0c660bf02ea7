"""CopyPlan: where in a running vLLM model to copy the elements of each checkpoint tensor.

vLLM's own reload rebuilds every layer for each set of weights. The first reload is recorded (recorder.py); a layer
whose parameters then hold exactly the bits that were sent is written in place from then on. On a CPU, linear layers
keep only a packed copy that cannot be accessed, so their weights are assembled and packed by vLLM's own function. All
other layers (experts, quantized layers) still use vLLM's loader; `reloaded` names their tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_vcpo.data.digests import digest
from megatron_vcpo.engines.vllm.recorder import Write, Written


@dataclass(slots=True)
class PlannedParameter:
    """An engine parameter that the plan writes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: torch.Tensor | None  # the engine's own storage; None if it keeps only a packed copy
    staging: torch.Tensor | None = None  # what has arrived of a packed parameter


@dataclass(slots=True)
class PlannedLayer:
    """A module that the plan writes."""

    name: str
    module: torch.nn.Module
    packs: bool  # multiplies with a packed copy, which is remade once all elements have arrived
    parameters: list[PlannedParameter] = field(default_factory=list)
    writes: int = 0
    waiting: int = 0  # writes still missing in this update


class CopyPlan:
    """Made from one recorded load of tensors with these `shapes`; `reason` says why nothing can be copied, if so."""

    def __init__(
        self, model: torch.nn.Module, written: Iterable[Written], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.reason: str | None = None
        self.reloaded: list[str] = []  # tensors that need vLLM's loader
        self.reloaded_layers: list[torch.nn.Module] = []
        self.layers: list[PlannedLayer] = []
        self.routes: dict[str, list[tuple[PlannedLayer, PlannedParameter, Write]]] = defaultdict(list)
        self._spare: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
        self._shapes = shapes
        self._build(model, list(written), list(shapes))

    def _build(self, model: torch.nn.Module, written: list[Written], names: list[str]) -> None:
        seen = {write.name for parameter in written for write in parameter.writes.values()}
        if unseen := [name for name in names if name not in seen]:
            self.reason = f"vLLM's loader does something else than copy {unseen[0]}"
            self.reloaded = names
            return
        modules = dict(model.named_modules())
        by_module: dict[str, list[Written]] = defaultdict(list)
        for parameter in written:
            by_module[parameter.module].append(parameter)
        slow = _with_shared_tensors({n for n, p in by_module.items() if not _can_copy(modules[n], p)}, by_module)
        reloaded: dict[str, None] = {}
        for name, parameters in by_module.items():
            if name in slow:
                self.reloaded_layers.append(modules[name])
                reloaded |= dict.fromkeys(w.name for p in parameters for w in p.writes.values())
            else:
                self._add_layer(name, modules[name], parameters)
        self.reloaded = list(reloaded)

    def _add_layer(self, name: str, module: torch.nn.Module, parameters: list[Written]) -> None:
        layer = PlannedLayer(name, module, packs=_packs(module))
        for written in parameters:
            now = module._parameters[written.parameter]
            assert now is not None
            kept = now.data if now.numel() else None
            parameter = PlannedParameter(written.parameter, written.shape, written.dtype, kept)
            layer.parameters.append(parameter)
            for write in written.writes.values():
                self.routes[write.name].append((layer, parameter, write))
                layer.writes += 1
        self.layers.append(layer)

    @property
    def is_stale(self) -> bool:
        """Whether the engine has moved a parameter to another storage since the plan was made."""
        for layer in self.layers:
            for parameter in layer.parameters:
                now = layer.module._parameters[parameter.name]
                if now is None or (parameter.kept is not None and now.data_ptr() != parameter.kept.data_ptr()):
                    return True
        return False

    # -- one update --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start an update, forgetting one that was aborted."""
        for layer in self.layers:
            layer.waiting = layer.writes
            for parameter in layer.parameters:
                parameter.staging = None

    def write(self, name: str, tensor: torch.Tensor) -> PlannedLayer | None:
        """Copy a tensor to its places. If that completes a layer that packs, returns it; call `pack` with it at
        once."""
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(f"its shape is {tuple(tensor.shape)}, that of the first set {self._shapes[name]}")
        complete = None
        tensor = tensor.contiguous()
        for layer, parameter, write in self.routes[name]:
            source = write.source.view(tensor)
            layer.waiting -= 1
            if parameter.kept is not None:
                write.target.view(parameter.kept).copy_(source)
            elif layer.waiting == 0 and _is_whole(source, parameter):
                parameter.staging = source  # gets packed before the producer may reuse its memory
            else:
                write.target.view(self._staging(parameter)).copy_(source)
            if layer.waiting == 0 and layer.packs:
                complete = layer
        return complete

    def pack(self, layer: PlannedLayer) -> None:
        """Pack a complete layer's weight with vLLM's function; multiplications use it from then on."""
        self.show_unpacked(layer)
        layer.module.quant_method.process_weights_after_loading(layer.module)
        for parameter in layer.parameters:
            if parameter.kept is None:
                assert layer.module._parameters[parameter.name].numel() == 0  # otherwise vLLM would use our memory
                parameter.staging = None

    def show_unpacked(self, layer: PlannedLayer) -> None:
        """Put the assembled weight where vLLM's packing, or an audit, finds it."""
        for parameter in layer.parameters:
            if parameter.kept is None:
                setattr(layer.module, parameter.name, torch.nn.Parameter(parameter.staging, requires_grad=False))

    def unwritten(self) -> list[str]:
        """Names of layers that did not get all of their elements."""
        return [f"{layer.name}.*" for layer in self.layers if layer.waiting]

    def _staging(self, parameter: PlannedParameter) -> torch.Tensor:
        """Memory to assemble a weight in. One buffer of each shape is kept, because fresh memory costs page faults."""
        if parameter.staging is None:
            buffers = self._spare[parameter.shape, parameter.dtype]
            busy = {p.staging.data_ptr() for layer in self.layers for p in layer.parameters if p.staging is not None}
            free = [buffer for buffer in buffers if buffer.data_ptr() not in busy]
            if not free:
                free = [torch.empty(parameter.shape, dtype=parameter.dtype)]
                buffers += free
            parameter.staging = free[0]
        return parameter.staging


def _is_whole(source: torch.Tensor, parameter: PlannedParameter) -> bool:
    return source.shape == parameter.shape and source.dtype == parameter.dtype and source.is_contiguous()


def _can_copy(module: torch.nn.Module, parameters: list[Written]) -> bool:
    """Whether vLLM's loader did nothing but copy into the layer's parameters and pack."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(module, "quant_method", None)
    if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return False
    if is_deferred_attention_layer(module) or any(True for child in module.children() for _ in child.parameters()):
        return False
    return all(_is_in_place(module, p) or _is_packed(module, p) for p in parameters)


def _is_in_place(module: torch.nn.Module, written: Written) -> bool:
    kept = module._parameters[written.parameter]
    if not written.landed or kept is None or tuple(kept.shape) != written.shape:
        return False
    return all(digest(write.target.view(kept.data)) == write.digest for write in written.writes.values())


def _is_packed(module: torch.nn.Module, written: Written) -> bool:
    now = module._parameters[written.parameter]
    whole = sum(write.target.numel for write in written.writes.values()) == torch.Size(written.shape).numel()
    return _packs(module) and now is not None and now.numel() == 0 and written.parameter == "weight" and whole


def _packs(module: torch.nn.Module) -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and hasattr(module, "cpu_linear")


def _with_shared_tensors(slow: set[str], by_module: dict[str, list[Written]]) -> set[str]:
    """`slow` extended by every layer that shares a tensor with one of them, since a tensor must go one way only."""
    while True:
        names = {w.name for layer in slow for p in by_module[layer] for w in p.writes.values()}
        wider = slow | {n for n, ps in by_module.items() if any(w.name in names for p in ps for w in p.writes.values())}
        if wider == slow:
            return slow
        slow = wider
