"""WeightAudit: check that a vLLM model holds what it was sent. Old values are overwritten first, so none can pass."""

from __future__ import annotations

from collections import defaultdict

import torch

from megatron_vcpo.data.digests import digest
from megatron_vcpo.engines.vllm.plan import CopyPlan, PlannedLayer, PlannedParameter
from megatron_vcpo.engines.vllm.recorder import Write

_PROBED_COLUMNS = 16  # columns read back of each packed weight


class WeightAudit:
    """One audited update through a CopyPlan: call `scramble`, then `note` and `packing` as tensors pass, then `wrong`.

    A parameter that the engine keeps is compared in full. For a packed weight, the assembled tensor is compared in
    full, and the packed copy is read by multiplying with it: a row of the unit matrix gives one column, exact to the
    bit, and a NaN left anywhere in the weight shows up.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self._plan = plan
        self._wrong: dict[str, None] = {}
        self._sent: dict[tuple[str, int], int] = {}
        self._columns: list[tuple[PlannedLayer, torch.Tensor, torch.Tensor]] = []
        self._writes: dict[str, list[tuple[PlannedParameter, Write, int]]] = defaultdict(list)  # by layer
        for routes in plan.routes.values():
            for number, (layer, parameter, write) in enumerate(routes):
                self._writes[layer.name].append((parameter, write, number))

    def scramble(self) -> None:
        """Overwrite with NaN everything that the plan writes; rows that pad a vocabulary are not written and stay
        unchanged."""
        for layer in self._plan.layers:
            for parameter, write, _ in self._writes[layer.name]:
                if parameter.kept is not None:
                    write.target.view(parameter.kept).fill_(torch.nan)
            for parameter in layer.parameters:
                if parameter.kept is None:
                    parameter.staging = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
            if layer.packs:
                self._plan.pack(layer)

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Remember the digests of a tensor that has arrived."""
        for number, (_, parameter, write) in enumerate(self._plan.routes.get(name, ())):
            self._sent[name, number] = digest(write.source.view(tensor.contiguous()).to(parameter.dtype))

    def packing(self, layer: PlannedLayer) -> None:
        """Compare a complete layer that is about to be packed, and remember some columns of its weight."""
        self._compare(layer, kept=False)
        self._plan.show_unpacked(layer)
        weight = layer.module.weight.data
        columns = torch.randperm(weight.shape[1])[:_PROBED_COLUMNS]
        self._columns.append((layer, columns, weight[:, columns].T + 0.0))

    def wrong(self) -> list[str]:
        """Names of engine parameters that do not hold what was sent."""
        for layer in self._plan.layers:
            self._compare(layer, kept=True)
        for layer, columns, expected in self._columns:
            width = next(p.shape[1] for p in layer.parameters if p.name == "weight")
            rows = torch.nn.functional.one_hot(columns, width).to(expected.dtype)
            if not torch.equal(layer.module.cpu_linear(rows, layer.module.weight, None), expected):
                self._wrong[f"{layer.name}.weight"] = None
        return list(self._wrong)

    def _compare(self, layer: PlannedLayer, *, kept: bool) -> None:
        for parameter, write, number in self._writes[layer.name]:
            held = parameter.kept if kept else parameter.staging
            if held is None or (parameter.kept is None) == kept:
                continue
            if digest(write.target.view(held)) != self._sent.get((write.name, number)):
                self._wrong[f"{layer.name}.{parameter.name}"] = None
