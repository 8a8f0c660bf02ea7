"""latest_checkpointed_iteration.txt is written in place, and before the whole checkpoint that it names is on disk.

A process killed between open() and write() leaves it empty, and then no checkpoint in the folder can be loaded. After a
power failure it may name a checkpoint whose small files (metadata.json, the rollout state) never reached the disk,
because only the tensors' files are synced. This patch syncs the checkpoint's files first, then writes the tracker under
another name, syncs it, and renames it.

Versions: megatron-core 0.19.2, checkpointing.save_checkpoint(), for every device; not with --enable-msc, whose object
stores replace files atomically. No longer needed when
`tests/patches/test_whole_tracker.py::test_stock_megatron_still_writes_the_tracker_in_place` fails.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_vcpo.runtime.files import replace_bytes, sync

_TRACKER = "latest_checkpointed_iteration.txt"


class _Storage:
    """Megatron's maybe_msc, except that it opens the tracker with `_whole`."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        from megatron.core.msc_utils import MultiStorageClientFeature

        if mode == "w" and os.path.basename(path) == _TRACKER and not MultiStorageClientFeature.is_enabled():
            return _whole(Path(path))
        return self.stock.open(path, mode, *args, **kwargs)


def apply() -> None:
    """Write the tracker atomically, after the checkpoint that it names. Idempotent."""
    from megatron.training import checkpointing

    if not isinstance(checkpointing.maybe_msc, _Storage):
        checkpointing.maybe_msc = _Storage(checkpointing.maybe_msc)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[io.StringIO]:
    text = io.StringIO()
    yield text
    name = text.getvalue()
    checkpoint = path.parent / (f"iter_{int(name):07d}" if name.isdecimal() else name)
    for file in sorted(checkpoint.rglob("*"), reverse=True):  # a folder after its contents
        sync(file)
    sync(checkpoint)
    sync(path.parent)
    replace_bytes(path, name.encode())
