"""The INT8 handler of vLLM's CPU backend: what it keeps of the scales, without and with the patch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from megatron_vcpo.patches import vllm_cpu_int8_reload

pytestmark = pytest.mark.engine


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM's CPU backend is not the one in use")
    for name in ("create_onednn_scaled_mm", "onednn_scaled_mm"):
        monkeypatch.setattr(_custom_ops, name, inspect.unwrap(getattr(_custom_ops, name)))
    return _custom_ops


def product_after_doubling_the_scales(ops: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's output while its scales are as they were given, and after that memory was written to."""
    torch.manual_seed(0)
    # At most 64, so that the stock kernel is exact on every processor: patches/vllm_cpu_int8_saturation.py.
    weight = torch.randint(-64, 65, (64, 32), dtype=torch.int8)
    scales = torch.rand(32, 1) * 0.01 + 0.01
    given = scales.clone()
    handler = ops.create_onednn_scaled_mm(weight.t().contiguous().t(), scales, torch.float32, False, False, 32)
    x = torch.randint(-127, 127, (3, 64), dtype=torch.int8)

    def product() -> torch.Tensor:
        out = torch.empty(3, 32)
        return ops.onednn_scaled_mm(handler, x, out, torch.tensor([0.5]), None, None, None).clone()

    first = product()
    expected = (x.float() @ weight.float()) * given.flatten() * 0.5
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-3)
    scales.mul_(2.0)
    return first, product()


def test_the_scales_are_still_freed(ops: Any) -> None:
    """The handler reads the caller's memory at every call: after a reload, memory that was given back."""
    first, second = product_after_doubling_the_scales(ops)
    torch.testing.assert_close(second, 2.0 * first)


def test_with_the_patch_a_handler_owns_its_scales(ops: Any) -> None:
    vllm_cpu_int8_reload.apply()
    vllm_cpu_int8_reload.apply()
    first, second = product_after_doubling_the_scales(ops)
    torch.testing.assert_close(second, first)


def test_the_amx_kernel_still_refuses_float32(ops: Any) -> None:
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    weight = torch.ops._C.convert_weight_packed(torch.randint(-127, 127, (32, 64), dtype=torch.int8))
    scales = torch.full((32, 1), 0.01)
    torch.ops._C.int8_scaled_mm_with_quant(torch.ones(3, 64).bfloat16(), weight, scales, None, torch.bfloat16, True)
    with pytest.raises(RuntimeError, match="expect A to be bfloat16 or half"):
        torch.ops._C.int8_scaled_mm_with_quant(torch.ones(3, 64), weight, scales, None, torch.float32, True)
