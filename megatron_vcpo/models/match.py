"""Match a model that is spread over ranks with a family's table: which rank holds what, and what does not match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_vcpo.models.naming import (
    ModelShape,
    NamingError,
    ParameterLayout,
    ParameterSpec,
    local_parameters,
    local_problems,
)

# The names that a pipeline stage holds (None: its model could not be read), and its problems.
_Stage = tuple[list[str] | None, list[str]]


@dataclass(frozen=True, slots=True)
class Match:
    """What this rank holds, and the pipeline stage that holds each parameter of the model."""

    local: dict[str, torch.Tensor]  # including the last stage's copy of tied embeddings, if any
    stage_of: dict[str, int]
    problems: list[str]

    def error(self, kind: type[Exception]) -> Exception | None:
        """The problems as one exception; None if there are none."""
        if not self.problems:
            return None
        return kind(f"The model does not match the table of names: {'; '.join(self.problems)}.")


def match_model(
    model_chunks: Sequence[torch.nn.Module], specs: Sequence[ParameterSpec], shape: ModelShape, groups: Any | None
) -> Match:
    """Compare names and shapes in both directions. Collective over the pipeline group."""
    layout = ParameterLayout.of(groups)
    by_name = {spec.name: spec for spec in specs}
    local: dict[str, torch.Tensor] = {}
    names: list[str] | None = None
    try:
        if shape.num_experts % layout.ep_size:
            raise NamingError(
                f"{shape.num_experts} experts do not divide over {layout.ep_size} expert-parallel ranks; "
                "change --expert-model-parallel-size"
            )
        local = local_parameters(model_chunks, shape, layout)
        names = [name for name in local if name in by_name]
        problems = local_problems(local, by_name, shape, layout)
    except NamingError as error:
        problems = [str(error).rstrip(".")]
    mine: _Stage = (names, problems)
    stages = [mine]
    if layout.pp_size > 1:
        assert groups is not None
        stages = [mine] * layout.pp_size
        dist.all_gather_object(stages, mine, group=groups.pp)
    return _combine(local, stages, specs, shape, layout)


def _combine(
    local: dict[str, torch.Tensor],
    stages: Sequence[_Stage],
    specs: Sequence[ParameterSpec],
    shape: ModelShape,
    layout: ParameterLayout,
) -> Match:
    problems = [f"pipeline stage {stage}: {p}" for stage, (_, found) in enumerate(stages) for p in found]
    stage_of: dict[str, int] = {}
    for stage, (names, _) in enumerate(stages):
        for name in names or ():
            if name in stage_of:
                problems.append(f"{name} is held by pipeline stages {stage_of[name]} and {stage}")
            stage_of[name] = stage
    # experts on other expert-parallel ranks are on the same stage as their layer's other parameters
    stage_of_layer = {spec.layer: stage_of[spec.name] for spec in specs if spec.name in stage_of}
    missing = []
    for spec in specs:
        if spec.name in stage_of:
            continue
        foreign = spec.expert is not None and spec.expert * layout.ep_size // shape.num_experts != layout.ep_rank
        if foreign and spec.layer in stage_of_layer:
            stage_of[spec.name] = stage_of_layer[spec.layer]
        else:
            missing.append(spec.name)
    if missing and all(names is not None for names, _ in stages):
        problems.append(f"no rank holds {', '.join(missing)}")
    return Match(local, stage_of, problems)
