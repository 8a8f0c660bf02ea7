"""Complete trajectories of a rollout phase in a file, which the mismatch report reads."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_vcpo.data.columns import pack_trajectories, unpack_trajectories
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.runtime.files import replacing

FOLDER = "trajectories"
_ORIGIN = "origin"


class SavedBatchError(ValueError):
    """A file from which no trajectories can be read; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How the trajectories of a file were made."""

    version: int  # version of the engine's weights (optimizer steps taken)
    temperature: float
    engine_dtype: str  # 'float32', 'float16' or 'bfloat16'
    trainer_dtype: str
    router_replay: str  # --rollout-router-replay: whose routes the trajectories carry
    quantized: bool = False  # the engine computed with quantized weights


def batch_path(run_dir: Path, version: int) -> Path:
    """The file for the trajectories of a phase with this version of the weights."""
    return run_dir / FOLDER / f"version_{version:07d}.npz"


def save_batch(path: Path, trajectories: Sequence[Trajectory], origin: Origin) -> None:
    """Write trajectories and their origin, creating the folder and replacing an existing file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    note = np.frombuffer(json.dumps(dataclasses.asdict(origin)).encode(), np.uint8)
    with replacing(path) as partial, partial.open("wb") as file:
        columns = pack_trajectories(trajectories) | {_ORIGIN: note}
        np.savez_compressed(file, **columns)  # type: ignore[arg-type]  # mypy takes it for allow_pickle


def load_batch(path: Path) -> tuple[list[Trajectory], Origin]:
    """Read what `save_batch` wrote.

    Raises:
        SavedBatchError: the file is missing, damaged or of another kind.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        origin = Origin(**json.loads(bytes(columns.pop(_ORIGIN).tobytes())))
        return unpack_trajectories(columns), origin
    except FileNotFoundError as error:
        raise SavedBatchError(f"There is no file {path}; a run writes them with --rollout-save-batch.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise SavedBatchError(
            f"{path} is not a batch that a run saved with --rollout-save-batch ({type(error).__name__}: {error})."
        ) from error
