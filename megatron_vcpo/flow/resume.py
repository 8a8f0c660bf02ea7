"""What is saved besides Megatron's checkpoint: the loop's state, the KL reference's weights, the model's files."""

from __future__ import annotations

import argparse
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_vcpo.checkpoint.hf_config import write_model_dir
from megatron_vcpo.checkpoint.model_files import RECORD, ModelFiles
from megatron_vcpo.config import ConfigError
from megatron_vcpo.mcore.reference import ReferencePolicy
from megatron_vcpo.models.description import ModelFacts
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.runtime.agreement import raise_together
from megatron_vcpo.runtime.files import replacing

_CRC = "crc32"  # key of the checksum in a safetensors file's header


def load_loop_state(args: argparse.Namespace) -> dict[str, Any]:
    """The loop's saved state of the iteration that was loaded.

    Raises:
        ConfigError: the file is missing or belongs to another iteration.
    """
    path = _state_path(args)
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: the checkpoint holds no rollout state, so prompts and buffered trajectories would be "
            "lost; add --finetune to start a new run from its weights."
        )
    try:
        return as_arrays(torch.load(path, map_location="cpu", weights_only=True)["dataloader_state_dict"])
    except (RuntimeError, EOFError, KeyError, OSError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}): the checkpoint's rollout state is damaged; resume an "
            "earlier one with --ckpt-step, or add --finetune to start a new run from its weights."
        ) from error


def _state_path(args: argparse.Namespace) -> Path:
    """The file's name depends on whether the run that saved it had pipeline stages; its contents do not depend on the
    layout."""
    from megatron.training.checkpointing import get_checkpoint_name

    staged = args.pipeline_model_parallel_size > 1
    names = [
        get_checkpoint_name(
            args.load,
            args.iteration,
            pipeline_parallel=pipeline_parallel,
            tensor_rank=0,
            pipeline_rank=0,
            expert_parallel=False,
            expert_rank=0,
            basename="train_dataloader_dprank000.pt",
        )
        for pipeline_parallel in (staged, not staged)
    ]
    found = [Path(name) for name in names if Path(name).is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=Path(names[0]))


def as_tensors(state: Any) -> Any:
    """A state with its numpy arrays as tensors, so that it can be loaded without unpickling arbitrary objects."""
    if isinstance(state, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(state))
    if isinstance(state, dict):
        return {key: as_tensors(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [as_tensors(value) for value in state]
    return state


def as_arrays(state: Any) -> Any:
    """The inverse of `as_tensors`."""
    if isinstance(state, torch.Tensor):
        return state.numpy()
    if isinstance(state, dict):
        return {key: as_arrays(value) for key, value in state.items()}
    if isinstance(state, list):
        return [as_arrays(value) for value in state]
    return state


def save_model_files(args: argparse.Namespace, transformer_config: Any, files: ModelFiles) -> None:
    """Write what belongs to the model besides its weights into --save, for the converters and a later --load.

    Raises:
        CheckpointError, OSError: on every rank, if the folder cannot be written.
    """
    failure: Exception | None = None
    if args.rank == 0:
        facts = ModelFacts.from_args(args, args.vocab_size)
        try:
            write_model_dir(Path(args.save) / RECORD, transformer_config, facts, files, dtype=args.params_dtype)
        except (CheckpointError, OSError) as error:
            failure = error
    raise_together(failure)


def reference_path(args: argparse.Namespace, checkpoints: str) -> Path:
    """The file with this rank's shard of the KL reference, in the folder `checkpoints`."""
    folder = Path(checkpoints) / "kl_reference"
    layout = (
        f"tp{args.tensor_model_parallel_size}_pp{args.pipeline_model_parallel_size}_ep{args.expert_model_parallel_size}"
    )
    return folder / f"{layout}_rank{args.rank:05d}.safetensors"


def save_reference(reference: ReferencePolicy, path: Path) -> None:
    """Write the reference, once, at iteration 0; a file that exists already holds the same weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: value.contiguous() for name, value in reference.state_dict().items()}
    with replacing(path) as partial:
        save_file(state, partial, metadata={_CRC: _crc(state)})


def load_reference(reference: ReferencePolicy, path: Path) -> None:
    """Read the reference that iteration 0 wrote.

    Raises:
        ConfigError: on every rank; the file is missing, damaged, or from another layout.
    """
    failure: ConfigError | None = None
    try:
        _read_reference(reference, path)
    except ConfigError as error:
        failure = error
    raise_together(failure)


def _crc(state: dict[str, torch.Tensor]) -> str:
    """CRC-32 of names, dtypes, shapes and values."""
    crc = 0
    for name, tensor in sorted(state.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), crc)
    return f"{crc:08x}"


def _read_reference(reference: ReferencePolicy, path: Path) -> None:
    if not path.is_file():
        raise ConfigError(
            f"The KL reference {path} is missing (it is written at iteration 0, for one layout); resume with the "
            "layout it was saved under, or set --vcpo-kl-coefficient 0."
        )
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            noted = (file.metadata() or {}).get(_CRC)
        if noted not in (None, _crc(state)):  # files of earlier versions have none
            raise ValueError(f"its checksum is {_crc(state)}, and {noted} was noted when it was saved")
        reference.load_state_dict(state)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(
            f"The KL reference {path} is damaged or of another layout ({error}); resume with the layout it was saved "
            "under, or set --vcpo-kl-coefficient 0."
        ) from error
