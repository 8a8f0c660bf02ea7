"""Trajectories of a rollout phase on disk, whole: what tools/mismatch_report.py reads."""

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
    """A file that holds no trajectories; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How the trajectories of a file were made."""

    version: int  # of the engine's weights: optimizer steps taken
    temperature: float
    engine_dtype: str  # 'float32', 'float16' or 'bfloat16'
    trainer_dtype: str
    router_replay: str  # of --rollout-router-replay: whose routes the trajectories carry
    quantized: bool = False  # the engine computed with quantized weights


def batch_path(run_dir: Path, version: int) -> Path:
    """Where a phase's trajectories go."""
    return run_dir / FOLDER / f"version_{version:07d}.npz"


def save_batch(path: Path, trajectories: Sequence[Trajectory], origin: Origin) -> None:
    """Write trajectories and their origin; the folder is made, and an earlier file of the name replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    note = np.frombuffer(json.dumps(dataclasses.asdict(origin)).encode(), np.uint8)
    with replacing(path) as partial, partial.open("wb") as file:
        columns = pack_trajectories(trajectories) | {_ORIGIN: note}
        np.savez_compressed(file, **columns)  # type: ignore[arg-type]  # taken for allow_pickle, the one named argument


def load_batch(path: Path) -> tuple[list[Trajectory], Origin]:
    """Read what `save_batch` wrote.

    Raises:
        SavedBatchError: there is no such file, or it is another kind of file or damaged.
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
