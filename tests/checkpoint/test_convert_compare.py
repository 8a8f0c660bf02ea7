"""What counts as the same tensor and the same logits."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_vcpo.checkpoint.convert.compare import Ledger, LogitGap, _enter

A = torch.tensor([1.0, 1.0 + 2**-12, -3.0])  # bf16 has 8 bits, so that the second becomes 1


def entered(a: torch.Tensor, b: torch.Tensor) -> Ledger:
    ledger = Ledger()
    _enter(ledger, "x", a, b)
    return ledger


@pytest.mark.parametrize("swap", [False, True])
def test_rounding_to_the_narrower_type_is_the_only_difference_that_is_forgiven(swap: bool) -> None:
    right, wrong = A.bfloat16(), torch.tensor([1.0, 1.0, -3.02]).bfloat16()
    pairs = [(right, A), (wrong, A)] if swap else [(A, right), (A, wrong)]
    assert (entered(*pairs[0]).rounded, entered(*pairs[0]).same) == (1, True)
    different = entered(*pairs[1])
    assert (different.rounded, different.same) == (0, False)
    assert different.differences[0].largest == pytest.approx(abs(wrong[2].item() + 3))


def test_one_type_has_to_agree_in_every_bit() -> None:
    assert entered(A, A.clone()).equal == 1
    other = A.clone()
    other[1] = 1.0
    difference = entered(A, other).differences[0]
    assert difference.what == "values"
    assert difference.largest == 2**-12
    assert difference.relative == pytest.approx(2**-12 / A.double().norm().item())


def test_half_types_are_compared_by_their_values() -> None:
    exact = torch.tensor([1.0, -0.5])
    assert entered(exact.half(), exact.bfloat16()).rounded == 1
    assert not entered(A.half() + 0.25, A.bfloat16()).same


def test_a_shape_is_a_difference_without_a_size() -> None:
    difference = entered(A, A[:2]).differences[0]
    assert difference.what == "shape (3,) in A, (2,) in B"
    assert math.isnan(difference.largest)


def test_logits_may_differ_as_much_as_another_order_of_additions_makes_them() -> None:
    assert LogitGap(largest=3e-5, scale=1.0).same
    assert LogitGap(largest=3e-4, scale=10.0).same
    assert not LogitGap(largest=3e-4, scale=1.0).same
    assert not LogitGap(largest=math.nan, scale=1.0).same
