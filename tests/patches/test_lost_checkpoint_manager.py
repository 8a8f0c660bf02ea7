"""The process behind Megatron's saves may be ended from outside, and only because of the patch."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_vcpo.patches import lost_checkpoint_manager
from tests.oracle.single_process import single_process_megatron


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Megatron's module without the patch and with a queue whose manager was killed."""
    with single_process_megatron():
        from megatron.core.dist_checkpointing.strategies import filesystem_async as module

        stock = module.get_write_results_queue
        if getattr(stock, "outlives_managers", False):
            stock = stock.__wrapped__
        monkeypatch.setattr(module, "get_write_results_queue", stock)
        monkeypatch.setattr(module, "_results_queue", None)
        before = multiprocessing.active_children()
        module.get_write_results_queue().put("of the first save")
        assert module.get_write_results_queue().get_nowait() == "of the first save"
        (manager,) = set(multiprocessing.active_children()) - set(before)
        os.kill(manager.pid, signal.SIGKILL)
        manager.join(60.0)
        assert not manager.is_alive()
        yield module
        if module._results_queue is not None:
            module._results_queue._manager.shutdown()


def test_stock_megatron_still_hands_out_the_queue_of_a_dead_manager(writer: Any) -> None:
    with pytest.raises((OSError, EOFError)):
        writer.get_write_results_queue().put("of the next save")


def test_the_next_save_gets_a_new_manager_and_keeps_it(writer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lost_checkpoint_manager.apply()
    lost_checkpoint_manager.apply()
    writer.get_write_results_queue().put("of the next save")
    assert writer.get_write_results_queue().get_nowait() == "of the next save"
    assert capsys.readouterr().err.count("was ended from outside; a new one is started") == 1
