"""Hook into Megatron's training: write checksums after each save, and compare them before each load."""

from __future__ import annotations

import argparse
import functools
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vcpo.checkpoint import checksums
from megatron_vcpo.checkpoint.torch_dist import TRACKER
from megatron_vcpo.runtime.logs import log_single_rank

logger = logging.getLogger(__name__)


def install(*, verify: bool, rollout_state: bool) -> None:
    """Wrap the functions of dist_checkpointing with which megatron.training saves and starts to load. Idempotent.

    Args:
        verify: whether to write and compare checksums. If False, a save removes those that an earlier save left.
        rollout_state: whether the run will read the flow's state.
    """
    from megatron.core import dist_checkpointing

    stock_save, stock_load = dist_checkpointing.save, dist_checkpointing.load_common_state_dict
    if hasattr(stock_save, "__wrapped__"):
        return

    @functools.wraps(stock_save)
    def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        request = stock_save(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        finish = functools.partial(_finish, Path(checkpoint_dir), verify)
        if request is None:
            finish()
        else:
            request.finalize_fns.append(finish)  # an asynchronous save: runs on all ranks once everything is on disk
        return request

    # load_checkpoint() calls this first, on all ranks, for every distributed checkpoint.
    @functools.wraps(stock_load)
    def load_common_state_dict(checkpoint_dir: Any) -> Any:
        if verify and not checksums.verify(Path(checkpoint_dir), rollout_state=rollout_state):
            log_single_rank(
                logger,
                logging.INFO,
                f"note: {checkpoint_dir} holds no {checksums.MANIFEST}, so that damage of its files is not looked for.",
            )
        return stock_load(checkpoint_dir)

    dist_checkpointing.save = save
    dist_checkpointing.load_common_state_dict = load_common_state_dict


def loaded_iteration(args: argparse.Namespace) -> Path | None:
    """The folder of the iteration that --load will read; None without --load."""
    if args.load is None:
        return None
    tracker = Path(args.load) / TRACKER
    name = tracker.read_text(encoding="ascii").strip() if args.ckpt_step is None else str(args.ckpt_step)
    return Path(args.load) / (name if name == "release" else f"iter_{int(name):07d}")


def _finish(folder: Path, verify: bool) -> None:
    if verify:
        checksums.write(folder)
    elif not dist.is_initialized() or dist.get_rank() == 0:
        checksums.remove(folder)
