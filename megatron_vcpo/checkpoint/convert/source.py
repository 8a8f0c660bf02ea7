"""Two kinds of checkpoint under one interface, which gives parameters one at a time, by the tables' specs."""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_vcpo.checkpoint.convert.entries import Entries, assemble, global_sizes
from megatron_vcpo.checkpoint.load_hf import check_names
from megatron_vcpo.checkpoint.model_files import ModelFiles, fingerprint, read_model_folder, read_record
from megatron_vcpo.checkpoint.safetensors_folder import SafetensorsFolder
from megatron_vcpo.checkpoint.torch_dist import TorchDistFolder, is_megatron
from megatron_vcpo.models.building.offline import args_from_checkpoint, build_model, describe_args
from megatron_vcpo.models.description import ModelDescription, describe_hf
from megatron_vcpo.models.errors import CheckpointError, some
from megatron_vcpo.models.naming import ParameterSpec, export_tensors, import_shard, join_experts

_TYPES = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_RELEASE_BYTES = 16 << 20  # mapped pages of files count as memory until the files are closed
# What a run saves besides its model, and modules' state that is not weights.
_NOT_WEIGHTS = re.compile(r"^(optimizer|chained_\d+\.|rng_state|rerun_state|common_state)|\._extra_state")


class CheckpointSource(ABC):
    """A checkpoint's parameters, in Megatron's arrangement and in transformers'."""

    path: Path
    description: ModelDescription
    padded_vocab_size: int
    specs: list[ParameterSpec]
    groups: list[tuple[ParameterSpec, ...]]
    """Parameters made from the same Hugging Face tensors: one, or one for each expert."""
    files: ModelFiles | None
    """What belongs to the model besides its weights; None if a Megatron checkpoint has no record of it."""

    def __init__(self) -> None:
        self.shape = self.description.shape(self.padded_vocab_size)
        self.specs = self.description.family.parameters(self.shape)
        self.groups = [tuple(group) for _, group in itertools.groupby(self.specs, key=lambda spec: spec.hf)]
        self._group_of = {name: group for group in self.groups for name, _ in group[0].hf}
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    @abstractmethod
    def dtype(self, spec: ParameterSpec) -> torch.dtype:
        """Dtype in which the parameter is stored (fp32 for fp64)."""

    @abstractmethod
    def parameter(self, spec: ParameterSpec) -> torch.Tensor:
        """The whole parameter in Megatron's arrangement and its stored dtype."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Facts by which a resumed conversion recognizes the same checkpoint."""

    @property
    def names(self) -> list[str]:
        """Hugging Face names, in the order of the table."""
        return list(self._group_of)

    def hf_tensor(self, name: str) -> torch.Tensor:
        """One tensor by its Hugging Face name."""
        group = self._group_of[name]
        if self._last[0] != group[0].name:
            self._last = ("", {})  # free it before the next one is read
            self._last = (group[0].name, dict(self.hf_tensors(group)))
        return self._last[1][name]

    def hf_tensors(self, group: Sequence[ParameterSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """The Hugging Face tensors of one of `groups`."""
        parts = (
            (spec, name, tensor)
            for spec in group
            for name, tensor in export_tensors(spec, self.shape, self.parameter(spec).unsqueeze(0))
        )
        yield from join_experts(parts, self.shape)


class HuggingFaceSource(CheckpointSource):
    """config.json and safetensors files.

    Raises:
        CheckpointError: an unknown family, missing or unknown tensors, wrong shapes, quantized weights.
    """

    def __init__(self, folder: str | Path, padded_vocab_size: int | None = None) -> None:
        self.path = Path(folder)
        self.description = describe_hf(folder)
        self.padded_vocab_size = padded_vocab_size or self.description.vocab_size
        super().__init__()
        self._tensors = SafetensorsFolder(folder)
        self.files: ModelFiles = read_model_folder(folder)
        self._unreleased = 0
        check_names(self._tensors, self.specs, self.shape)

    def dtype(self, spec: ParameterSpec) -> torch.dtype:
        types = [_TYPES[self._tensors.slice(name).get_dtype()] for name, _ in spec.hf]
        return types[0] if len(set(types)) == 1 else torch.float32

    def parameter(self, spec: ParameterSpec) -> torch.Tensor:
        tensor = import_shard(spec, self.shape, self._tensors.slice, 0, 1).to(self.dtype(spec))
        self._unreleased += tensor.nbytes
        if self._unreleased > _RELEASE_BYTES:
            self._tensors.release()
            self._unreleased = 0
        return tensor

    def hf_tensors(self, group: Sequence[ParameterSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, _ in group[0].hf:
            yield name, self._tensors.slice(name)[:]

    def fingerprint(self) -> dict[str, Any]:
        files = sorted({*self.path.glob("*.safetensors"), *fingerprint(self.files)})
        return {"source": str(self.path.absolute()), "files": [_identity(file) for file in files]}


class MegatronSource(CheckpointSource):
    """A torch_dist checkpoint written by training or by the converter, from any layout.

    Call everything in `single_process`.

    Args:
        folder: the folder given to --save, or that of one iteration.
        step: the iteration; default: the latest.
        vocab_size: true vocabulary, needed if the checkpoint does not record it.

    Raises:
        CheckpointError: no such checkpoint, a model of no family, missing or unknown tensors.
    """

    def __init__(self, folder: str | Path, *, step: int | None = None, vocab_size: int | None = None) -> None:
        self._folder = TorchDistFolder(folder, step)
        self.path = self._folder.path
        self.files = read_record(self.path, self.path.parent)
        state = self._folder.common()
        self.saved_args = state["args"]
        self.args = args_from_checkpoint(state["args"])
        self.padded_vocab_size = int(self.args.padded_vocab_size)
        self.description = describe_args(self.args, self._vocab_size(vocab_size))
        super().__init__()
        stored = self._folder.tensors
        self.metadata = {
            "singleton_local_shards": bool((state.get("content_metadata") or {}).get("singleton_local_shards")),
            # either one key for each layer, or one global tensor for all layers
            "non_homogeneous_layers": any(key.startswith("decoder.layers.0.") for key in stored),
        }
        self._entries = Entries.of(build_model(self.args, weights=False), self.specs, self.shape, self.metadata)
        self._check_keys()

    def dtype(self, spec: ParameterSpec) -> torch.dtype:
        keys = [self._key(spec, key) for key in sorted(self._entries.keys(spec))]
        return self._folder.tensors[keys[0]].properties.dtype

    def parameter(self, spec: ParameterSpec) -> torch.Tensor:
        entry = self._entries.tensors[spec.name]
        return assemble(
            entry,
            lambda piece: self._folder.read(self._key(spec, piece.key), piece.global_offset, global_sizes(piece)).view(
                piece.local_shape
            ),
        )

    def load_model(self) -> Any:
        """The model with its weights, in fp32, loaded as training loads it: by Megatron's dist_checkpointing."""
        from megatron.core import dist_checkpointing

        model = build_model(self.args, weights=True)
        state = {"model": model.sharded_state_dict(metadata=dict(self.metadata))}
        model.load_state_dict(dist_checkpointing.load(state, str(self.path))["model"])
        return model

    def fingerprint(self) -> dict[str, Any]:
        files = sorted([*self.path.glob("*.distcp"), self.path / ".metadata", *fingerprint(self.files)])
        return {"source": str(self.path.absolute()), "files": [_identity(file) for file in files]}

    def _vocab_size(self, given: int | None) -> int:
        """The true vocabulary: the one that the checkpoint records, else the one given."""
        if self.args.vocab_size:
            check_vocab_size(self.path, self.args.vocab_size, given)
            return int(self.args.vocab_size)
        if given is None:
            raise CheckpointError(
                f"{self.path} does not know its true vocabulary, only the padded {self.padded_vocab_size}; "
                "give --vocab-size."
            )
        if not 0 < given <= self.padded_vocab_size:
            raise CheckpointError(
                f"--vocab-size {given} cannot be the true vocabulary of {self.path}, whose padded one is "
                f"{self.padded_vocab_size}; give a number from 1 to that."
            )
        return given

    def _key(self, spec: ParameterSpec, key: str) -> str:
        """The key that the checkpoint uses: the local layer spec's, or Transformer Engine's."""
        if key in self._folder.tensors:
            return key
        return self._entries.twin_key(spec, key) or key

    def _check_keys(self) -> None:
        """Check that every parameter is stored, and nothing that the table does not know."""
        known: set[str | None] = set()
        missing = []
        for spec in self.specs:
            for key in self._entries.keys(spec):
                known |= {key, self._entries.twin_key(spec, key)}
                if self._key(spec, key) not in self._folder.tensors:
                    missing.append(key)
        unknown = [key for key in self._folder.tensors if key not in known and not _NOT_WEIGHTS.search(key)]
        problems = [f"it lacks {some(missing)}"] if missing else []
        problems += [f"it also holds {some(unknown)}"] if unknown else []
        if problems:
            raise CheckpointError(
                f"{self.path} does not hold a {self.description.family.name} model: {'; '.join(problems)}."
            )


def open_source(folder: str | Path, *, step: int | None = None, vocab_size: int | None = None) -> CheckpointSource:
    """The checkpoint in a folder, of either kind. Call it in `single_process`.

    Raises:
        CheckpointError: it cannot be read, or `step` or `vocab_size` do not apply to it.
    """
    if is_megatron(folder):
        return MegatronSource(folder, step=step, vocab_size=vocab_size)
    if step is not None:
        raise CheckpointError(
            f"{folder} is no folder of a Megatron run, so that it has no iteration {step}; drop --step-a or --step-b."
        )
    source = HuggingFaceSource(folder)
    check_vocab_size(source.path, source.description.vocab_size, vocab_size)
    return source


def check_vocab_size(path: Path, recorded: int, given: int | None) -> None:
    """Raise CheckpointError if --vocab-size contradicts what the checkpoint records."""
    if given not in (None, recorded):
        raise CheckpointError(f"{path} records a vocabulary of {recorded}, not --vocab-size {given}; drop the flag.")


def convert(tensor: torch.Tensor, dtype: torch.dtype, name: str, path: Path) -> torch.Tensor:
    """The tensor in another dtype; CheckpointError, naming it, if a value overflows or is not finite."""
    converted = tensor.to(dtype)
    if bool(torch.isfinite(converted).all()):
        return converted
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{name} of {path} holds values that are not finite; the checkpoint is damaged.")
    largest = tensor.abs().max().item()
    raise CheckpointError(
        f"{name} of {path} holds {largest:g}, more than {dtype} can ({torch.finfo(dtype).max:g}); use --dtype bf16 "
        "or fp32."
    )


def _identity(file: Path) -> list[Any]:
    status = file.stat()
    return [file.name, status.st_size, status.st_mtime_ns]
