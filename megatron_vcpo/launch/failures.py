"""What to tell a person about an error that ends a run: one sentence where the error's kind explains itself."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from megatron_vcpo.config import ConfigError
from megatron_vcpo.engines.protocol import EngineError
from megatron_vcpo.environments import EnvironmentSetupError
from megatron_vcpo.mcore.packing import PackingError
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.observability.metrics import MetricsFileError
from megatron_vcpo.patches.checkpoint_unpickling import UnreadableCheckpoint
from megatron_vcpo.sync.errors import SyncError

_KNOWN = (
    CheckpointError,
    ConfigError,
    EngineError,
    EnvironmentSetupError,
    MetricsFileError,
    PackingError,
    SyncError,
    UnreadableCheckpoint,
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_DISK_BYTES = 16 << 20  # free space below which a failed save is the disk's fault
_QUOTED = 400  # characters of another library's reason
_PROGRAMMING = (AttributeError, NameError, TypeError)


def failure_sentence(error: BaseException, args: argparse.Namespace, run_dir: str | None) -> str | None:
    """The sentence; None where the trace is needed.

    Args:
        error: it is looked at, then what caused it.
        args: Megatron's; where checkpoints are saved to and loaded from.
        run_dir: where the run writes what it measures; None is the folder of the checkpoints.
    """
    chain = list(_chain(error))
    for seen in chain:
        if isinstance(seen, _KNOWN):
            return str(seen)
    for seen in chain:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return _full_disk(seen, [folder for folder in (run_dir, args.save) if folder])
    if _raised_in(error, "megatron/training/checkpointing.py", "load_checkpoint"):
        return None if isinstance(chain[-1], _PROGRAMMING) else _not_loaded(chain[-1], args)
    if _raised_in(error, "multiprocessing/managers.py", "_callmethod"):
        return (
            "the process that collects what a checkpoint's writers wrote was ended from outside during a save, so this "
            f"checkpoint was not written to --save {args.save}. The last complete one (named in "
            "latest_checkpointed_iteration.txt) is untouched; go on with --load."
        )
    # Megatron's writers run in processes of their own and lose the reason on the way: the disk itself has to tell.
    if args.save is not None and _free(args.save) < _FULL_DISK_BYTES:
        return (
            f"the disk of --save {args.save} is full: the checkpoint of this iteration was not written. The last "
            "complete one (named in latest_checkpointed_iteration.txt) is untouched; free some space and go on with "
            "--load."
        )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what caused it and so on; of torch's collection of the ranks' errors, the first rank's."""
    from torch.distributed.checkpoint.api import CheckpointException

    seen: BaseException | None = error
    while seen is not None:
        yield seen
        if isinstance(seen, CheckpointException):
            seen = next((failure for failure, _ in seen.failures.values()), None)
        else:
            seen = seen.__cause__ or seen.__context__


def _full_disk(error: OSError, folders: Sequence[str]) -> str:
    full = [folder for folder in folders if _free(folder) < _FULL_DISK_BYTES]
    where = str(error.filename) if error.filename is not None else " or ".join(full or folders) or "a file"
    return (
        f"the disk is full: {where} could not be written ({os.strerror(error.errno or 0)}). Free some space, or write "
        "elsewhere with --rollout-run-dir or --save, and go on from the last checkpoint with --load."
    )


def _free(folder: str) -> int:
    """Bytes left on the disk of a folder, or of the nearest one above it that exists."""
    path = Path(folder).absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def _not_loaded(reason: BaseException, args: argparse.Namespace) -> str:
    said = " ".join(f"{type(reason).__name__}: {reason}".split()).rstrip(".")
    said = said if len(said) <= _QUOTED else said[:_QUOTED] + " ..."
    which = f"iteration {args.ckpt_step} of " if getattr(args, "ckpt_step", None) else ""
    return (
        f"the checkpoint ({which}--load {args.load}) could not be loaded: {said}. Either the flags are of another "
        "model than the one it was saved with (--num-layers, --hidden-size, ...), or its files are incomplete: give "
        "the same flags, or go on from an earlier checkpoint with --ckpt-step."
    )


def _raised_in(error: BaseException, file: str, function: str) -> bool:
    """Whether a call of `function` is among those that the error passed through."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == function and code.co_filename.replace("\\", "/").endswith(file):
            return True
        trace = trace.tb_next
    return False
