"""Hugging Face -> Megatron's torch_dist format, one parameter in memory at a time."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_vcpo.checkpoint import checksums
from megatron_vcpo.checkpoint.convert.entries import Entries, pieces
from megatron_vcpo.checkpoint.convert.flags import FLAGS_FILE, TargetLayout, model_flags, script
from megatron_vcpo.checkpoint.convert.source import HuggingFaceSource, convert
from megatron_vcpo.checkpoint.convert.write import StreamingSave, Unit
from megatron_vcpo.checkpoint.hf_config import megatron_flags_for
from megatron_vcpo.checkpoint.model_files import CONFIG, RECORD, ModelFiles, write_into
from megatron_vcpo.checkpoint.partial_folder import PartialFolder
from megatron_vcpo.checkpoint.torch_dist import TRACKER
from megatron_vcpo.models.building.offline import args_from_flags, build_model
from megatron_vcpo.models.naming import ParameterSpec

# From a checkpoint of this name Megatron starts at iteration 0, without optimizer state.
RELEASE = "release"
_MEGATRONS_OWN = (".metadata", "metadata.json")  # what dist_checkpointing writes besides the planned files
# One key for each layer, as in Megatron's newer checkpoints. A model whose --moe-layer-freq is a list cannot load the
# older form, one tensor for all layers.
CONTENT = {"singleton_local_shards": False, "non_homogeneous_layers": True, "chained_optim_avoid_prefix": True}


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """The options of a conversion."""

    dtype: torch.dtype | None = None  # None: the dtype of each tensor
    shard_bytes: int = 5 << 30
    layout: TargetLayout = field(default_factory=TargetLayout)
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished conversion, before it gets its final name."""

    folder: PartialFolder
    checkpoint: Path  # the folder to load from
    flags: str  # bash arrays
    files: ModelFiles | None  # what else was written for the model; None: nothing is known


def convert_to_megatron(
    source_dir: str | Path,
    target: str | Path,
    options: ConversionOptions,
    progress: Callable[[int], object] = lambda _: None,
) -> Result:
    """Write everything into `<target>.partial`, which the caller then checks and commits.

    Call it in `single_process`.

    Args:
        source_dir: folder with config.json and safetensors files.
        target: folder for --load.
        options: dtype, file size, layout.
        progress: called with the bytes of each parameter written or already there.

    Raises:
        CheckpointError: an unknown model, a value overflows the dtype, a full disk; the partial folder stays.
    """
    flags = megatron_flags_for(source_dir, tensor_model_parallel_size=options.layout.tensor)
    args = args_from_flags(flags)
    source = HuggingFaceSource(source_dir, args.padded_vocab_size)
    options.layout.check(source.description, source.padded_vocab_size)
    entries = Entries.of(build_model(args, weights=False), source.specs, source.shape, CONTENT)
    settings = {"to": "megatron", **source.fingerprint(), **_settings(options)}
    folder = PartialFolder(Path(target), settings, overwrite=options.overwrite)
    try:
        units = [_unit(source, entries, spec, options.dtype) for spec in source.specs]
        strategy = StreamingSave(folder, RELEASE, units, shard_bytes=options.shard_bytes, progress=progress)
        folder.missing_bytes(strategy.planned_bytes)
        _save(strategy, source, entries, folder.path / RELEASE, args, options)
        for name in _MEGATRONS_OWN:
            folder.adopt(f"{RELEASE}/{name}")
        checksums.write(folder.path / RELEASE)
        folder.adopt(f"{RELEASE}/{checksums.MANIFEST}")
        flags_text = _launch_flags(source_dir, source, target, options)
        folder.write_text(FLAGS_FILE, flags_text)
        config = json.loads((source.path / CONFIG).read_text())
        write_into(folder, source.files.laid_out(config), under=RECORD)
        folder.write_text(TRACKER, RELEASE)  # last: nothing loads without it
    except BaseException:
        folder.close()
        raise
    return Result(folder=folder, checkpoint=folder.path / RELEASE, flags=flags_text, files=source.files)


def _settings(options: ConversionOptions) -> dict[str, Any]:
    return {"dtype": str(options.dtype), "shard size": options.shard_bytes, "layout": asdict(options.layout)}


def _unit(source: HuggingFaceSource, entries: Entries, spec: ParameterSpec, dtype: torch.dtype | None) -> Unit:
    target_type = stored_dtype(source, spec, dtype)
    return Unit(
        name=spec.name,
        nbytes=hf_bytes(spec, target_type),
        load=functools.partial(_load, source, entries, spec, target_type),
    )


def hf_bytes(spec: ParameterSpec, dtype: torch.dtype) -> int:
    """Bytes of a parameter's Hugging Face tensors in a dtype."""
    numel = sum(torch.Size(size).numel() for _, size in spec.hf)
    return (numel // spec.hf[0][1][0] if spec.is_joined else numel) * dtype.itemsize


def stored_dtype(source: Any, spec: ParameterSpec, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a parameter gets: its table's, else the one asked for, else the source's."""
    return spec.dtype or dtype or source.dtype(spec)


def _load(source: HuggingFaceSource, entries: Entries, spec: ParameterSpec, dtype: torch.dtype) -> list[Any]:
    names = ", ".join(name for name, _ in spec.hf)
    return _pieces(entries, spec, convert(source.parameter(spec), dtype, names, source.path))


def _pieces(entries: Entries, spec: ParameterSpec, data: torch.Tensor) -> list[Any]:
    """The parameter's parts, and a copy under Transformer Engine's key if that differs (norms only)."""
    found = pieces(entries.tensors[spec.name], data)
    return found + [
        replace(piece, key=key) for piece in found if (key := entries.twin_key(spec, piece.key)) is not None
    ]


def _save(
    strategy: StreamingSave,
    source: HuggingFaceSource,
    entries: Entries,
    path: Path,
    args: argparse.Namespace,
    options: ConversionOptions,
) -> None:
    from megatron.core import dist_checkpointing

    model: dict[str, Any] = entries.objects | entries.transformer_engine_objects(source.specs)
    for spec in source.specs:
        data = torch.empty(
            spec.full_shape(source.shape), dtype=stored_dtype(source, spec, options.dtype), device="meta"
        )
        for number, piece in enumerate(_pieces(entries, spec, data)):
            model[f"{spec.name}/{number}"] = piece
    args.tensor_model_parallel_size = options.layout.tensor
    args.pipeline_model_parallel_size = options.layout.pipeline
    args.expert_model_parallel_size = options.layout.expert
    path.mkdir(exist_ok=True)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "model": model}
    dist_checkpointing.save(state, path, strategy, content_metadata=dict(CONTENT))


def _launch_flags(
    source_dir: str | Path, source: HuggingFaceSource, target: str | Path, options: ConversionOptions
) -> str:
    embedding = source.specs[0]
    flags = model_flags(source_dir, stored_dtype(source, embedding, options.dtype), options.layout)
    arrays = {
        "MODEL_ARGS": flags,
        "PARALLEL_ARGS": options.layout.flags(),
        "LOAD_ARGS": ["--load", str(Path(target).absolute())],
    }
    return script(arrays)
