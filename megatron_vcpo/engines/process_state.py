"""Engine and trainer in one process: undo the engine's global changes before the trainer continues.

`EngineTurn` wraps every call into an in-process engine. Around each call it saves and restores

* the random generators of torch (CPU and CUDA), numpy and Python: vLLM reseeds them all;
* `torch.set_num_threads` itself (vLLM's CPU worker replaces it by a no-op) and the thread count;
* default dtype, default device, grad mode, float32 matmul precision, current CUDA device;
* warning filters and log levels: vLLM's many warnings and records below ERROR are dropped during a turn;
* `os.environ`: the engine's own variables (it sets LD_PRELOAD, LOCAL_WORLD_SIZE and about ten more) exist only during
  its turns, so that processes that the trainer starts do not inherit them;
* the CPUs the calling thread may run on.

The memory policy cannot be restored: vLLM's CPU worker binds the process to the NUMA node of its first CPU for good. So
on a machine with several NUMA nodes, start one rank per node under `numactl`. Another effect is kept on purpose:
objects alive when the engine is built stay hidden from the garbage collector (`gc.freeze`), which only saves time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping

import numpy as np
import torch


class EngineTurn:
    """Context manager, reusable but not reentrant: the engine runs inside it, the trainer outside.

    `variables` are set in `os.environ` at the first turn unless the user has set them. The environment at the end of a
    turn is restored at the start of the next one.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._engine_changes: dict[str, str | None] = {k: v for k, v in variables.items() if k not in os.environ}
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        if self._stack is not None:
            raise RuntimeError("An engine call was made from inside another engine call.")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_random_state())
            stack.enter_context(_torch_settings())
            stack.enter_context(_affinity())
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(_errors_only())
            stack.enter_context(self._environment())
            self._stack = stack.pop_all()

    def __exit__(self, *exception: object) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        before = dict(os.environ)
        _apply(self._engine_changes)
        try:
            yield
        finally:
            after = dict(os.environ)
            names = before.keys() | after.keys()
            self._engine_changes = {n: after.get(n) for n in names if after.get(n) != before.get(n)}
            _apply({name: before.get(name) for name in self._engine_changes})


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


@contextlib.contextmanager
def _torch_settings() -> Iterator[None]:
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    precision = torch.get_float32_matmul_precision()
    cuda_device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        torch.set_grad_enabled(grad)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        if cuda_device is not None:
            torch.cuda.set_device(cuda_device)


@contextlib.contextmanager
def _affinity() -> Iterator[None]:
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        yield
    finally:
        if cpus is not None and os.sched_getaffinity(0) != cpus:
            os.sched_setaffinity(0, cpus)
