"""Checks of the folders of --load and --save before a run starts, and protection of checkpoints that are there.

A run continues from its --save folder or starts in an empty one; it never takes over the folder of another run.
"""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path

from megatron_vcpo.checkpoint.torch_dist import TRACKER
from megatron_vcpo.config import ConfigError
from megatron_vcpo.runtime.files import replace_bytes, sync

logger = logging.getLogger(__name__)

_RELEASE = "release"


def check_folders(args: argparse.Namespace) -> None:
    """Refuse a --load that cannot be loaded and a --save that would be overwritten. Sets --load to None if the run
    starts there from scratch.

    Without this check, Megatron would continue with random weights, or exit with code 0.

    Raises:
        ConfigError: one sentence with the folder, what is wrong, and the newest complete checkpoint, if any.
    """
    if args.load is not None and not _holds_checkpoint(args):
        args.load = None
    if args.save is not None:
        refuse_takeover(args)


def refuse_takeover(args: argparse.Namespace) -> None:
    """Raise ConfigError if --save holds complete checkpoints but the run continues from none of them."""
    folder = Path(args.save)
    newest = newest_complete(folder) if folder.is_dir() else None
    if newest is None or (_is_same(args.load, folder) and not args.finetune):
        return
    to_go_on = f"--load {folder}"
    if not (folder / TRACKER).exists():
        to_go_on += f" --ckpt-step {_number(newest)}"
    if args.finetune and _is_same(args.load, folder):
        raise ConfigError(
            f"--save {folder} holds checkpoints (the newest complete one is {newest.name}), and with --finetune a new "
            "run would write over them; choose another --save."
        )
    raise ConfigError(
        f"--save {folder} holds checkpoints (the newest complete one is {newest.name}) that this run would not go on "
        f"from but write over; give {to_go_on} to go on, or choose another --save."
    )


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint of the highest iteration; None if there is none."""
    found = [path for path in folder.glob("iter_*") if re.fullmatch(r"iter_\d{7,}", path.name) and is_complete(path)]
    return max(found, key=_number, default=None)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint's folder holds the files written last: metadata.json, or those of --ckpt-format torch."""
    whole = (checkpoint / "metadata.json").is_file() and (checkpoint / ".metadata").is_file()
    return whole or any(checkpoint.glob("mp_rank_*/model_optim_rng.pt"))


def set_aside(args: argparse.Namespace, iteration: int) -> None:
    """Before a checkpoint is written, rename a complete one of the same iteration to keep it. Rank 0 only.

    A run that got further than the checkpoint from which this run continues wrote it. The tracker never names a folder
    that does not exist.
    """
    folder = Path(args.save)
    earlier = folder / f"iter_{iteration:07d}"
    if not is_complete(earlier):
        return
    tracker = folder / TRACKER
    if tracker.is_file() and tracker.read_text(encoding="ascii").strip() == str(iteration):
        if _is_same(args.load, folder) and (folder / f"iter_{args.iteration:07d}").is_dir():
            replace_bytes(tracker, str(args.iteration).encode())
        else:
            tracker.unlink()
    number = 1
    while (kept := folder / f"replaced_{earlier.name}.{number}").exists():
        number += 1
    earlier.rename(kept)
    sync(folder)
    logger.info(
        f"note: --save {folder} held a checkpoint of iteration {iteration} already, of a run that went further than "
        f"this one's start; it is kept as {kept.name} until you remove it."
    )


def _is_same(load: str | None, folder: Path) -> bool:
    return load is not None and Path(load).resolve() == folder.resolve()


def _holds_checkpoint(args: argparse.Namespace) -> bool:
    """Whether --load holds a checkpoint; False if it is the folder of a run that has not begun."""
    folder = Path(args.load)
    name = _asked_step(args) or _tracked(folder)
    if name is None:
        newest = newest_complete(folder)
        if newest is not None:
            raise ConfigError(
                f"--load {folder}: no {TRACKER} says which checkpoint is the latest; the newest complete one is "
                f"{newest.name}: give --ckpt-step {_number(newest)} to go on from it."
            )
        if _is_same(args.save, folder):
            return False
        raise ConfigError(f"--load {folder}: no checkpoint there (no {TRACKER}); correct the path or drop it.")
    checkpoint = folder / (name if name == _RELEASE else f"iter_{int(name):07d}")
    if not checkpoint.is_dir() or not any(checkpoint.iterdir()):
        namer = TRACKER if args.ckpt_step is None else "--ckpt-step"
        raise ConfigError(
            f"--load {folder}: the checkpoint {checkpoint.name} that {namer} names is missing or empty; "
            f"{_way_out(folder, remove=False)}."
        )
    return True


def _asked_step(args: argparse.Namespace) -> str | None:
    """--ckpt-step, which Megatron accepts only if the tracker is readable or missing."""
    if args.ckpt_step is None:
        return None
    if args.ckpt_step < 1:  # Megatron treats 0 as 'not given'
        raise ConfigError(f"--ckpt-step {args.ckpt_step} is not the number of a saved iteration; give one from 1 on.")
    _tracked(Path(args.load))
    return str(args.ckpt_step)


def _tracked(folder: Path) -> str | None:
    """The tracker's content: an iteration, or 'release'; None if there is no tracker."""
    tracker = folder / TRACKER
    if not tracker.exists() and not tracker.is_symlink():
        return None
    if not tracker.is_file():
        raise ConfigError(f"--load {folder}: {TRACKER} is not a file; {_way_out(folder)}.")
    try:
        text = tracker.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--load {folder}: {TRACKER} cannot be read ({error}); {_way_out(folder)}.") from error
    name = text.strip()
    if not name:
        raise ConfigError(
            f"--load {folder}: {TRACKER} is empty and not the number of an iteration; {_way_out(folder)}."
        )
    if name != _RELEASE and not name.isdecimal():
        raise ConfigError(
            f"--load {folder}: {TRACKER} holds {text[:40]!r} and not the number of an iteration; {_way_out(folder)}."
        )
    return name


def _way_out(folder: Path, *, remove: bool = True) -> str:
    newest = newest_complete(folder)
    if newest is None:
        return "no complete checkpoint is there; choose another folder" + (", or remove the file" if remove else "")
    step = f"--ckpt-step {_number(newest)} for {newest.name}, the newest complete checkpoint"
    return f"remove it and give {step}" if remove else f"give {step}"


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("iter_"))
