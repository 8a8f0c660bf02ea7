"""Fail together: a rank that raises alone leaves the others waiting in a collective."""

from __future__ import annotations

import torch.distributed as dist


def raise_together(failure: Exception | None) -> None:
    """Raise `failure` where it happened, and on every other rank an error of its class that quotes it.

    A collective over all processes; without torch.distributed it only raises.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        if failure is not None:
            raise failure
        return
    failures: list[tuple[type[Exception], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else (type(failure), str(failure)))
    if failure is not None:
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            raise other[0](f"Rank {rank} failed: {other[1]}")
