"""Let code written for CUDA run on CPU tensors: 'cuda' becomes an alias of 'cpu' if there is no CUDA device.

Why: Megatron-Core calls torch.cuda and allocates on device='cuda' unconditionally (about 900 places).
Versions: torch 2.13, megatron-core 0.19.2. Upstream: no CPU mode is planned.
No longer needed when `tests/patches/test_megatron_cpu.py::test_megatron_still_needs_the_cuda_alias` fails.

Functions are patched directly, not by a TorchFunctionMode: a mode is per thread and is popped while Tensor.backward
runs, so custom backwards (sequence parallel, MoE all-gather) would miss it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import types
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
_TOTAL_MEMORY = 1 << 34  # bytes reported to callers that size buffers by device memory
_installed = False


def installed() -> bool:
    """Whether the alias is installed in this process."""
    return _installed


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)  # device=torch.cuda.current_device()


def _redirect(kwargs: dict[str, Any]) -> None:
    if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
        kwargs["device"] = CPU
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False


def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _redirect(kwargs)
        return function(*args, **kwargs)

    return wrapper


class Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...


class _Event:
    """An event that has already been recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _QuietForkWarning(logging.Filter):
    """Hides Megatron's warning that the CPU generator changed inside its GPU RNG context; here they are one
    generator."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _nothing() -> Callable[..., None]:
    """A new no-op each time: torch.compile's rule table refuses one function under two names."""
    return lambda *args, **kwargs: None


def _cuda_names() -> dict[str, Any]:
    stream = Stream()
    properties = types.SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=_TOTAL_MEMORY, multi_processor_count=1
    )
    names: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: False,
        "Stream": Stream,
        "Event": _Event,
        "ExternalStream": Stream,
        "current_stream": lambda *args, **kwargs: stream,
        "default_stream": lambda *args, **kwargs: stream,
        "stream": lambda stream=None: contextlib.nullcontext(stream),
        "memory_stats": lambda *args, **kwargs: {},
        "memory_summary": lambda *args, **kwargs: "",
        "mem_get_info": lambda *args, **kwargs: (_TOTAL_MEMORY, _TOTAL_MEMORY),
        "get_device_capability": lambda *args, **kwargs: (9, 0),
        "get_device_properties": lambda *args, **kwargs: properties,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed) and None,
        "default_generators": (torch.default_generator,),
        "_lazy_call": lambda callback, **kwargs: callback(),
    }
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_stream"):
        names[name] = _nothing()
    for name in ("manual_seed_all", "_lazy_init"):
        names[name] = _nothing()
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        names[name] = lambda *args, **kwargs: 0
    return names


def hide_cuda() -> None:
    """Make torch.cuda.is_available() False again: importing vLLM switches torch to an NVML check, which believes the
    alias."""
    torch.cuda.is_available = lambda: False


def install() -> None:
    """Install the alias; does nothing if CUDA works or the alias is installed already."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    # jit_fuser is torch.compile: compiling small CPU kernels in C++ takes long and gains nothing.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Megatron requires it with tensor parallelism; without a device it has no effect.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name, value in _cuda_names().items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, _nothing())
    torch.cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()
    _redirect_factories()
    _redirect_methods()
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_QuietForkWarning())


def _redirect_factories() -> None:
    from torch.utils._device import _device_constructors

    likes = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
    functions: list[Any] = [*_device_constructors(), *(getattr(torch, name) for name in likes)]
    for function in functions:
        name = getattr(function, "__name__", "")
        exported = getattr(torch, name, None) is function
        if exported:
            setattr(torch, name, _factory(function))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, _factory(getattr(torch.Tensor, name)))


def _redirect_methods() -> None:
    to, type_ = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(to)
    def to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], torch.Tensor) and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        _redirect(kwargs)
        return to(self, *args, **kwargs)

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers dispatch on type names such as 'torch.cuda.HalfTensor'.
        result = type_(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if not args and not kwargs else result

    torch.Tensor.to, torch.Tensor.type = to_cpu, type_name
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, *args, **kwargs: None
    torch.nn.Module.cuda = lambda self, device=None: self
