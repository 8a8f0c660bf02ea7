"""Saving fails once the process in which Megatron collects its writers' results has died.

filesystem_async.get_write_results_queue() starts a manager process at the first save and keeps its queue forever. If
that process is killed (by the kernel's OOM killer or a person), every later save ends the run with a
ConnectionRefusedError or BrokenPipeError. The queue is empty between saves, so a new one does as well.

Versions: megatron-core 0.19.2, for every device. With --async-save, nvidia-resiliency-ext writes; its own copy of the
function is not patched. No longer needed when
`tests/patches/test_lost_checkpoint_manager.py::test_stock_megatron_still_hands_out_the_queue_of_a_dead_manager` fails.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def apply() -> None:
    """Start a new manager if the last one is gone. Idempotent."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    stock = filesystem_async.get_write_results_queue
    if not getattr(stock, "outlives_managers", False):
        filesystem_async.get_write_results_queue = _checked(filesystem_async, stock)


def _checked(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_write_results_queue(*args: Any, **kwargs: Any) -> Any:
        if module._results_queue is not None and not _answers(module._results_queue):
            logger.warning(
                "note: the process that collects what a checkpoint's writers wrote was ended from outside; a new one "
                "is started."
            )
            module._results_queue = None
        return stock(*args, **kwargs)

    get_write_results_queue.outlives_managers = True  # type: ignore[attr-defined]
    return get_write_results_queue


def _answers(queue: Any) -> bool:
    try:
        queue.qsize()
    except (OSError, EOFError):  # refused, reset or closed meanwhile
        return False
    return True
