"""What the folders of --load and --save hold before a run starts, and what a save may do to what is there.

A run goes on from what its --save folder holds, or starts in one that holds nothing: it never takes over.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from megatron_vcpo.checkpoint.torch_dist import TRACKER
from megatron_vcpo.config import ConfigError
from megatron_vcpo.runtime.files import replace_bytes, sync

_RELEASE = "release"


def check_folders(args: argparse.Namespace) -> None:
    """Refuse what could not be loaded, or would be written over; leave --load None where the run is to begin there.

    Megatron would go on with random weights, or exit with code 0.

    Raises:
        ConfigError: one sentence that names the folder, what is wrong, and the newest complete checkpoint if any.
    """
    if args.load is not None and not _holds_checkpoint(args):
        args.load = None
    if args.save is not None:
        refuse_takeover(args)


def refuse_takeover(args: argparse.Namespace) -> None:
    """Raise ConfigError where --save holds complete checkpoints and the run goes on from none of them."""
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
    """The checkpoint of the highest iteration that was written to its end."""
    found = [path for path in folder.glob("iter_*") if re.fullmatch(r"iter_\d{7,}", path.name) and is_complete(path)]
    return max(found, key=_number, default=None)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint's folder holds what is written last: metadata.json, or the files of --ckpt-format torch."""
    whole = (checkpoint / "metadata.json").is_file() and (checkpoint / ".metadata").is_file()
    return whole or any(checkpoint.glob("mp_rank_*/model_optim_rng.pt"))


def set_aside(args: argparse.Namespace, iteration: int) -> None:
    """Before a checkpoint is written: keep a complete one of the same iteration under another name. Rank 0 only.

    It was written by a run that went further than the checkpoint that this run went on from. At no moment does the
    tracker name what is not there.
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
    print(
        f"megatron_vcpo: note: --save {folder} held a checkpoint of iteration {iteration} already, of a run that went "
        f"further than this one's start; it is kept as {kept.name} until you remove it.",
        file=sys.stderr,
        flush=True,
    )


def _is_same(load: str | None, folder: Path) -> bool:
    return load is not None and Path(load).resolve() == folder.resolve()


def _holds_checkpoint(args: argparse.Namespace) -> bool:
    """False where --load names the folder of a run that is yet to begin."""
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
    """--ckpt-step, which Megatron takes only beside a readable tracker or none."""
    if args.ckpt_step is None:
        return None
    if args.ckpt_step < 1:  # Megatron takes 0 for 'not given'
        raise ConfigError(f"--ckpt-step {args.ckpt_step} is not the number of a saved iteration; give one from 1 on.")
    _tracked(Path(args.load))
    return str(args.ckpt_step)


def _tracked(folder: Path) -> str | None:
    """What the tracker names: an iteration, or 'release'; None where there is no tracker."""
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
