"""A digest: equal for equal bits, another for anything else."""

from __future__ import annotations

import pytest
import torch

from megatron_vcpo.data.digests import digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_equal_tensors_have_equal_digests_wherever_they_lie(dtype: torch.dtype) -> None:
    values = (torch.arange(600_000) % 997).to(dtype).view(600, 1000)
    assert digest(values) == digest(values.clone()) == digest(values.T.contiguous().T)


def test_one_flipped_bit_an_exchange_or_another_shape_changes_it() -> None:
    values = torch.randn(700, 1000)
    original = digest(values)
    bits = values.clone()
    bits.view(torch.int32)[699, 999] ^= 1
    exchanged = values.clone()
    exchanged[[0, 1]] = values[[1, 0]]
    far = values.flatten().clone()
    signs = torch.randn(1000)
    signs[:2] = torch.tensor([3.0, -3.0])
    swapped = signs.clone()
    swapped[[0, 1]] = signs[[1, 0]]
    assert digest(signs) != digest(swapped)
    far[[5, 5 + (1 << 17)]] = far[[5 + (1 << 17), 5]]  # the same place in two chunks
    assert len({original, digest(bits), digest(exchanged), digest(far.view(700, 1000)), digest(values.T)}) == 5
    assert digest(values.view(1000, 700)) != original


def test_the_two_zeros_are_one_and_nan_is_something_else() -> None:
    assert digest(torch.tensor([0.0, 1.0])) == digest(torch.tensor([-0.0, 1.0]))
    assert digest(torch.tensor([torch.nan, 1.0])) != digest(torch.tensor([0.0, 1.0]))
    assert isinstance(digest(torch.empty(0)), int)
