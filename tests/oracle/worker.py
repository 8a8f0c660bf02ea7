"""What every worker under torchrun does around its checks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

PASSED = "all checks passed"
DEADLINE = timedelta(minutes=5)  # a collective that others never enter fails instead of hanging


@contextmanager
def worker() -> Iterator[None]:
    """One thread, gloo, Megatron patched for it; prints PASSED where every rank came through the body."""
    from megatron_vcpo.patches import megatron_cpu

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=DEADLINE)
    megatron_cpu.patch_megatron()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        print(PASSED, flush=True)
    dist.destroy_process_group()


@contextmanager
def check(name: str) -> Iterator[list[str]]:
    """Name a check: in what it raises, and in a line when it is done, with the words that the body appends."""
    started, words = time.perf_counter(), list[str]()
    try:
        yield words
    except Exception as error:
        error.add_note(f"rank {dist.get_rank()}: {name}")
        raise
    if dist.get_rank() == 0:
        print("ok", name, f"({time.perf_counter() - started:.1f} s)", *words, flush=True)
