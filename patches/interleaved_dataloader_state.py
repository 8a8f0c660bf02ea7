"""Megatron cannot save an external iterator's state in a run with virtual pipeline stages.

Versions: megatron-core 0.19.2. With --num-virtual-stages-per-pipeline-rank, pretrain() has a list of iterators, one for
each model chunk, which maybe_save_dataloader_state() takes for a single one (AttributeError: 'list' object has no
attribute 'iterable'). Ours all have the same state. No longer needed when
`tests/patches/test_interleaved_dataloader_state.py::test_stock_megatron_still_takes_a_list_for_an_iterator` fails.
"""

from __future__ import annotations

import functools
from typing import Any


def apply() -> None:
    """Save the state of the first chunk's iterator. Idempotent."""
    from megatron.training import checkpointing

    stock = checkpointing.maybe_save_dataloader_state
    if getattr(stock, "takes_chunks", False):
        return

    @functools.wraps(stock)
    def save(train_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(train_iterator, list):
            train_iterator = train_iterator[0]
        return stock(train_iterator, *args, **kwargs)

    save.takes_chunks = True  # type: ignore[attr-defined]
    checkpointing.maybe_save_dataloader_state = save
