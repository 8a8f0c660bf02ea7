"""Load a Hugging Face checkpoint into a Megatron model: each rank reads its own part, by the tables that sync/ uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_vcpo.checkpoint.safetensors_folder import SafetensorsFolder
from megatron_vcpo.models.description.hf import describe_hf
from megatron_vcpo.models.errors import CheckpointError, some
from megatron_vcpo.models.match import match_model
from megatron_vcpo.models.naming import Family, ModelShape, ParameterLayout, ParameterSpec, import_shard
from megatron_vcpo.models.naming.families import EMBEDDING, OUTPUT_LAYER
from megatron_vcpo.runtime.agreement import raise_together

# Old checkpoints store this buffer, though it follows from the configuration.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"^(model\.layers\.(\d+))\.")
_EMBED_TOKENS, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_hf_checkpoint(
    model_chunks: Sequence[torch.nn.Module],
    family: Family,
    shape: ModelShape,
    folder: str | Path,
    groups: Any | None = None,
) -> int:
    """Copy a checkpoint into the parameters in place, in their dtype; returns how many parameters this rank filled.

    Call it on every rank, before the optimizer copies its main parameters and after Float16Module, which would round
    the router's bias. Rows beyond the checkpoint's vocabulary become zero. Nothing is written unless every name and
    shape agrees.

    Args:
        model_chunks: this rank's GPTModels, wrapped or not; one for each virtual pipeline stage.
        family: the table of names.
        shape: sizes of the whole model.
        folder: config.json's folder, with model.safetensors or a sharded index.
        groups: process groups `tp`, `pp`, `ep`, `expt_tp` (ProcessGroupCollection); None for a single process.

    Raises:
        CheckpointError: on every rank; unreadable files, missing or unknown names, wrong shapes, values that are not
            finite.
    """
    specs = family.parameters(shape)
    match = match_model(model_chunks, specs, shape, groups)
    raise_together(match.error(CheckpointError))
    failure: Exception | None = None
    try:
        source = SafetensorsFolder(folder)
        check_names(source, specs, shape)
        _fill(match.local, {spec.name: spec for spec in specs}, shape, source, ParameterLayout.of(groups))
    except CheckpointError as error:
        failure = error
    raise_together(failure)
    return len(match.local)


def check_hf_folder(folder: str | Path) -> None:
    """Check that the folder holds exactly the weights of its config.json; reads only headers.

    It needs neither process groups nor a model, so call it before they exist.

    Raises:
        CheckpointError: an unknown model, an unreadable file, tensors that are missing, unknown, of the wrong shape or
            quantized.
    """
    model = describe_hf(folder)
    shape = model.shape(model.vocab_size)
    check_names(SafetensorsFolder(folder), model.family.parameters(shape), shape, values=False)


def check_names(
    source: SafetensorsFolder, specs: Sequence[ParameterSpec], shape: ModelShape, *, values: bool = True
) -> None:
    """Check that the checkpoint holds exactly the table's tensors, with their shapes.

    Args:
        source: the checkpoint.
        specs: the table of its family.
        shape: sizes of the model.
        values: if a tied model stores its output layer, also compare its values with the embedding's.

    Raises:
        CheckpointError: one sentence with the first tensors of each problem.
    """
    expected = dict(pair for spec in specs for pair in spec.hf)
    names = {name for name in source.names() if not _IGNORED.search(name)}
    if shape.tied_embeddings and _LM_HEAD in names:
        if values:
            _check_tied(source)
        names.discard(_LM_HEAD)
    problems = []
    if missing := expected.keys() - names:
        problems.append(f"it lacks {some(missing)}")
    further = {name: m[1] for name in names if (m := _LAYER.match(name)) and int(m[2]) >= shape.num_layers}
    if further:
        layers = ", ".join(sorted(set(further.values())))
        problems.append(
            f"it holds {layers} beyond the {shape.num_layers} layers of the model: multi-token-prediction layers, "
            "which are not trained here; leave their tensors out of the checkpoint"
        )
    if unknown := sorted(names - set(expected) - set(further)):
        problems.append(f"it also holds {some(unknown)}")
    found = names & set(expected)
    misshapen = {
        f"{name} is {source.shape(name)}, the model needs {expected[name]}"
        for name in found
        if source.shape(name) != expected[name]
    }
    rounded = {
        f"{name} is not stored as floating point (a quantized checkpoint?)"
        for name in found
        if not source.is_float(name)
    }
    problems += [some(group) for group in (misshapen, rounded) if group]
    if problems:
        raise CheckpointError(f"{source.folder} is not a checkpoint of this model: {'; '.join(problems)}.")


def _check_tied(source: SafetensorsFolder) -> None:
    """Some checkpoints of tied models store the output layer nevertheless; it must then equal the embedding."""
    same_shape = source.shape(_LM_HEAD) == source.shape(_EMBED_TOKENS)
    if not same_shape or not torch.equal(source.slice(_LM_HEAD)[:], source.slice(_EMBED_TOKENS)[:]):
        raise CheckpointError(
            f"{source.folder} holds an {_LM_HEAD} that is not its embedding, but the model ties the two; "
            "add --untie-embeddings-and-output-weights."
        )


@torch.no_grad()
def _fill(
    local: dict[str, torch.Tensor],
    specs: dict[str, ParameterSpec],
    shape: ModelShape,
    source: SafetensorsFolder,
    layout: ParameterLayout,
) -> None:
    for name, parameter in local.items():
        # the last stage's copy of tied embeddings is filled from the embedding itself
        spec = specs[EMBEDDING if name == OUTPUT_LAYER and shape.tied_embeddings else name]
        shard = import_shard(spec, shape, source.slice, *layout.tp_of(spec))
        parameter.copy_(shard)
        if not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(
                f"{name}, loaded as {parameter.dtype} from {', '.join(n for n, _ in spec.hf)} of {source.folder}, "
                "holds values that are not finite: the file is damaged or its values exceed that type; try --bf16."
            )
