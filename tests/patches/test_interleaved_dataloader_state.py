"""The state of an external iterator is saved with virtual pipeline stages too, and only because of the patch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_vcpo.patches import interleaved_dataloader_state
from tests.oracle.single_process import single_process_megatron


def chunks() -> list[Any]:
    """What pretrain() holds for two model chunks."""
    return [SimpleNamespace(iterable=SimpleNamespace(save_state=lambda n=n: {"chunk": n})) for n in range(2)]


def test_stock_megatron_still_takes_a_list_for_an_iterator(tmp_path: Path) -> None:
    with single_process_megatron():
        from megatron.training import checkpointing

        stock = checkpointing.maybe_save_dataloader_state
        stock = getattr(stock, "__wrapped__", stock)
        with pytest.raises(AttributeError, match="'list' object has no attribute 'iterable'"):
            stock(chunks(), 3, str(tmp_path))


def test_the_first_chunks_state_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with single_process_megatron():
        from megatron.training import checkpointing

        monkeypatch.setattr(
            checkpointing,
            "maybe_save_dataloader_state",
            getattr(
                checkpointing.maybe_save_dataloader_state, "__wrapped__", checkpointing.maybe_save_dataloader_state
            ),
        )
        interleaved_dataloader_state.apply()
        interleaved_dataloader_state.apply()
        checkpointing.maybe_save_dataloader_state(chunks(), 3, str(tmp_path))
        checkpointing.maybe_save_dataloader_state(chunks()[1], 4, str(tmp_path))
    saved = [torch.load(file)["dataloader_state_dict"] for file in sorted(tmp_path.rglob("*.pt"))]
    assert saved == [{"chunk": 0}, {"chunk": 1}]
