"""What a program finds when it has imported its libraries, as a line of JSON: to compare a fork with a new process."""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from typing import Any

_IMPORTS = (
    "megatron_vcpo.launch",
    "transformers",
    "megatron.core",
    "megatron.training",
    "megatron.training.checkpointing",
)
_NOT_COMPARED = {"_"}  # of the environment: the shell's


class OfMain:
    """A class that a spawned process has to find in the program that it belongs to."""

    value = 7


def value_of(thing: OfMain) -> int:
    """Run in the spawned process."""
    return thing.value


def collect() -> dict[str, Any]:
    """The state of this process; "random" is what no two processes should share."""
    import numpy as np
    import torch

    main = sys.modules["__main__"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(value_of, (OfMain(),))
    return {
        "arguments": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "environment": {name: value for name, value in os.environ.items() if name not in _NOT_COMPARED},
        "places": [os.getcwd(), tempfile.gettempdir(), *map(os.path.abspath, sys.path)],
        "main": [main.__spec__ is not None, main.__name__, main.OfMain is OfMain, spawned],
        "multiprocessing": [multiprocessing.get_start_method(), multiprocessing.parent_process() is None],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "tensors": [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled()],
        "precision": [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()],
        "cuda": [torch.cuda.is_available(), str(torch.zeros(1, device="cuda").device)],
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "warnings": [sorted(map(str, warnings.filters)), sys.warnoptions],
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:4],
        "cpus": sorted(os.sched_getaffinity(0)),
        "random": [torch.initial_seed(), torch.rand(1).item(), float(np.random.rand()), random.random()],
    }


if __name__ == "__main__":
    importlib.import_module("megatron_vcpo.patches.megatron_cpu").install()
    for name in _IMPORTS:
        importlib.import_module(name)
    atexit.register(print, "at exit")
    print(json.dumps(collect()))
