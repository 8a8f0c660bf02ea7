"""Megatron's parallel state for a job of one process, over gloo and without a port."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vcpo.patches import megatron_cpu, modelopt_without_vllm


@contextmanager
def single_process_megatron() -> Iterator[Any]:
    """Yield the ProcessGroupCollection; initialises only what is not there yet, and removes only what it made."""
    modelopt_without_vllm.apply()
    megatron_cpu.install()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    megatron_cpu.patch_megatron()
    own_dist, own_state = not dist.is_initialized(), not parallel_state.model_parallel_is_initialized()
    with tempfile.TemporaryDirectory() as folder:
        if own_dist:
            dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        if own_state:
            parallel_state.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(1234)
        try:
            yield ProcessGroupCollection.use_mpu_process_groups()
        finally:
            if own_state:
                parallel_state.destroy_model_parallel()
            if own_dist and dist.is_initialized():  # vLLM's shutdown may have been here first
                dist.destroy_process_group()
