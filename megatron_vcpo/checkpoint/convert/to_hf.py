"""Megatron's torch_dist format -> Hugging Face, one output file in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_vcpo.checkpoint.convert.flags import FLAGS_FILE, model_flags, script
from megatron_vcpo.checkpoint.convert.source import MegatronSource, convert
from megatron_vcpo.checkpoint.convert.to_megatron import ConversionOptions, Result, hf_bytes, stored_dtype
from megatron_vcpo.checkpoint.convert.write import split
from megatron_vcpo.checkpoint.hf_config import hf_config_from_megatron
from megatron_vcpo.checkpoint.model_files import CONFIG, ModelFiles, with_chosen_tokenizer, write_into
from megatron_vcpo.checkpoint.partial_folder import PartialFolder
from megatron_vcpo.models.description import ModelFacts
from megatron_vcpo.models.naming import ParameterSpec

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Part:
    """Parameters whose Hugging Face tensors are written together."""

    specs: tuple[ParameterSpec, ...]  # made from the same Hugging Face tensors
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(hf_bytes(spec, self.dtype) for spec in self.specs)


def convert_to_hf(
    source: MegatronSource,
    target: str | Path,
    options: ConversionOptions,
    *,
    tokenizer: str | Path | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> Result:
    """Write everything into `<target>.partial`, which the caller then checks and commits. Call it in `single_process`.

    Args:
        source: the checkpoint.
        target: folder to create.
        options: dtype, file size, layout (only for the flags).
        tokenizer: folder whose tokenizer is copied to the model; None copies the checkpoint's.
        progress: called with the bytes of each parameter written or already there.

    Raises:
        CheckpointError: a value overflows the dtype, no tokenizer, a full disk; the partial folder stays.
    """
    options.layout.check(source.description, source.padded_vocab_size)
    files = with_chosen_tokenizer(source.files, tokenizer)
    settings = {
        "to": "hf",
        **source.fingerprint(),
        "dtype": str(options.dtype),
        "shard size": options.shard_bytes,
        "tokenizer": None if tokenizer is None else str(Path(tokenizer).absolute()),
    }
    folder = PartialFolder(Path(target), settings, overwrite=options.overwrite)
    try:
        parts = [_Part(group, stored_dtype(source, group[0], options.dtype)) for group in source.groups]
        groups = split(parts, options.shard_bytes)
        plan = dict(zip(_names(len(groups)), groups))
        folder.missing_bytes({name: sum(part.nbytes for part in group) for name, group in plan.items()})
        for name, group in plan.items():
            _write(folder, name, group, source, progress)
        if len(plan) > 1:
            folder.write_text(_INDEX, _index(plan))
        dtype = plan[next(iter(plan))][0].dtype
        _write_files(folder, source, files, dtype)
        flags = script({"MODEL_ARGS": model_flags(folder.path, dtype, options.layout)})
        folder.write_text(FLAGS_FILE, flags)
    except BaseException:
        folder.close()
        raise
    return Result(folder=folder, checkpoint=folder.path, flags=flags, files=files)


def _names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write(
    folder: PartialFolder, name: str, group: Sequence[_Part], source: MegatronSource, progress: Callable[[int], object]
) -> None:
    if name in folder.finished:
        progress(sum(part.nbytes for part in group))
        return
    tensors: dict[str, torch.Tensor] = {}
    with folder.file(name) as file:
        for part in group:
            for key, tensor in source.hf_tensors(part.specs):
                tensors[key] = _own(convert(tensor, part.dtype, key, source.path))
            progress(part.nbytes)
        save_file(tensors, file.path, metadata={"format": "pt"})


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares memory with no larger one."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _index(plan: dict[str, list[_Part]]) -> str:
    places = {key: name for name, group in plan.items() for part in group for key, _ in part.specs[0].hf}
    total = sum(part.nbytes for group in plan.values() for part in group)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


def _write_files(folder: PartialFolder, source: MegatronSource, files: ModelFiles | None, dtype: torch.dtype) -> None:
    """Write everything except the weights; config.json last, because nothing loads the folder without it."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    facts = ModelFacts.from_args(source.args, source.description.vocab_size)
    fields = hf_config_from_megatron(core_transformer_config_from_args(source.args), facts, dtype=dtype)
    if files is None:
        folder.write_text(CONFIG, json.dumps(fields, indent=2) + "\n")
    else:
        write_into(folder, files.laid_out(fields))
