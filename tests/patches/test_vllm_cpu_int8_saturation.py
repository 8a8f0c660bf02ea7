"""INT8 products of vLLM's CPU backend: right on every processor, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vcpo.patches import vllm_cpu_int8_reload, vllm_cpu_int8_saturation
from megatron_vcpo.patches.vllm_cpu_int8_saturation import in_halves, is_exact

pytestmark = pytest.mark.engine

SIZES = ((64, 32), (96, 101), (512, 192), (33, 1))  # inputs, outputs
VNNI = {"avx512_vnni", "avx_vnni", "amx_int8"}


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's operations without a patch, put back afterwards."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM's CPU backend is not the one in use")
    for name in ("create_onednn_scaled_mm", "onednn_scaled_mm"):
        monkeypatch.setattr(_custom_ops, name, inspect.unwrap(getattr(_custom_ops, name)))
    monkeypatch.setattr(vllm_cpu_int8_saturation, "_halved", False)
    return _custom_ops


def force(monkeypatch: pytest.MonkeyPatch, *verdicts: bool) -> None:
    """What the probes of a layer say, one after another."""
    said = iter(verdicts)
    monkeypatch.setattr(vllm_cpu_int8_saturation, "is_exact", lambda *_: next(said))


def products(ops: Any, k: int, n: int, dtype: torch.dtype = torch.float32, rows: int = 5) -> tuple[Any, Any]:
    """(what the kernel gives, exact) for weights and activations of the whole range, with a bias."""
    generator = torch.Generator().manual_seed(k)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
    x = torch.randint(-128, 128, (rows, k), dtype=torch.int8, generator=generator)
    scales = torch.rand(n, 1, generator=generator) * 1e-3 + 1e-3
    bias = torch.randn(n, generator=generator).to(dtype)
    handler = ops.create_onednn_scaled_mm(weight.t(), scales, dtype, False, False, 32)
    found = torch.empty(rows, n, dtype=dtype)
    ops.onednn_scaled_mm(handler, x, found, torch.tensor([0.5]), None, None, bias)
    exact = (x.double() @ weight.t().double()) * 0.5 * scales.flatten().double() + bias.double()
    return found, exact.to(dtype)


def processor_adds_in_32_bits() -> bool:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")  # x86 alone has such a line
    return not flags or bool(VNNI & set(flags.split()))


def test_pairs_of_products_still_saturate(ops: Any) -> None:
    if processor_adds_in_32_bits():
        pytest.skip("this processor adds INT8 products in 32 bits")
    assert not is_exact(ops.create_onednn_scaled_mm, ops.onednn_scaled_mm, 64, 32, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_with_the_patch_products_are_exact_on_every_processor(ops: Any, k: int, n: int, dtype: torch.dtype) -> None:
    vllm_cpu_int8_reload.apply()
    vllm_cpu_int8_saturation.apply()
    vllm_cpu_int8_saturation.apply()
    for rows in (1, 5):
        torch.testing.assert_close(*products(ops, k, n, dtype, rows))


def test_a_size_is_probed_whatever_torchs_default_type_is(ops: Any) -> None:
    """vLLM makes and reloads layers under the model's type."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    vllm_cpu_int8_saturation.apply()
    with set_default_torch_dtype(torch.bfloat16):
        ops.create_onednn_scaled_mm(
            torch.zeros(32, 64, dtype=torch.int8).t(), torch.ones(32, 1).float(), torch.bfloat16, False, False, 32
        )
    torch.testing.assert_close(*products(ops, 64, 32, torch.bfloat16))


@pytest.mark.parametrize("order", [1, -1])
def test_halves_are_exact_on_a_processor_that_needs_none(ops: Any, order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, False, True)
    for patch in (vllm_cpu_int8_reload, vllm_cpu_int8_saturation)[::order]:
        patch.apply()
    assert not vllm_cpu_int8_saturation.in_use()
    torch.testing.assert_close(*products(ops, 64, 32))
    assert vllm_cpu_int8_saturation.in_use()
    torch.testing.assert_close(*products(ops, 64, 32))  # the size was probed: it is not asked again
    with pytest.raises(StopIteration):
        products(ops, 64, 33)


def test_an_exact_kernel_gets_its_weights_whole(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, True)
    packed: list[tuple[int, ...]] = []
    stock = ops.create_onednn_scaled_mm
    monkeypatch.setattr(
        ops, "create_onednn_scaled_mm", lambda w, *rest: (packed.append(tuple(w.shape)), stock(w, *rest))[1]
    )
    vllm_cpu_int8_saturation.apply()
    products(ops, 64, 32)
    assert packed == [(64, 32)]
    assert not vllm_cpu_int8_saturation.in_use()


def test_where_no_way_is_exact_the_layer_is_refused(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, False, False)
    vllm_cpu_int8_saturation.apply()
    with pytest.raises(RuntimeError, match=r"multiplies \[64, 32\] weights wrongly.* leave --rollout-engine-quant"):
        products(ops, 64, 32)


def test_halves_sum_to_the_weights_and_fit_sixteen_bits() -> None:
    weight = torch.arange(-128, 128, dtype=torch.int8).view(2, 128).t()  # [128, 2]
    halves = in_halves(weight)
    assert halves.shape == (256, 2)
    assert halves.t().is_contiguous()
    assert torch.equal(halves[:128] + halves[128:], weight)
    assert 2 * 255 * int(halves.int().abs().max()) <= 32767


def kernel(worst: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
    """A kernel in tensor operations whose sums of two neighbouring products pass through `worst`."""

    def create(weight: torch.Tensor, scales: torch.Tensor, *_: Any) -> Any:
        return weight.long(), scales.double().flatten()

    def multiply(handler: Any, x: torch.Tensor, out: torch.Tensor, *_: Any) -> torch.Tensor:
        weight, scales = handler
        products = (x.long() + 128)[:, :, None] * weight  # [rows, k, n]
        pairs = worst(products.unflatten(1, (-1, 2)).sum(2)).sum(1)
        return out.copy_((pairs - 128 * weight.sum(0)) * scales)

    return create, multiply


def test_the_probe_tells_a_saturating_kernel_from_an_exact_one() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert is_exact(*kernel(lambda pairs: pairs), 64, 31, dtype)
        assert not is_exact(*kernel(lambda pairs: pairs.clamp(-32768, 32767)), 64, 31, dtype)
        assert not is_exact(*kernel(lambda pairs: pairs.clamp(max=32767)), 64, 31, dtype)
        assert not is_exact(*kernel(lambda pairs: pairs.clamp(min=-32768)), 64, 31, dtype)
        assert not is_exact(*kernel(lambda pairs: pairs * float("nan")), 64, 31, dtype)
