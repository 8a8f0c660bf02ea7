"""FP16 with experts: one overflow, one loss scale."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_vcpo.patches import shared_loss_scale
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import Size, build_tiny_gpt


@pytest.fixture(scope="module")
def groups():
    with single_process_megatron() as collection:
        yield collection


def overflow(groups, *, experts: bool, patched: bool) -> list[float]:
    """Scales of the dense and the expert parameters, 1024 at first, after an overflow in one of the two kinds."""
    tiny = build_tiny_gpt(
        groups, size=Size(experts=4), params_dtype=torch.float16, expert_model_parallel_size=2
    )  # two: only then have experts a scaler of their own
    parts = tiny.optimizer.chained_optimizers
    if patched:
        shared_loss_scale.apply(tiny.optimizer)
    for part in parts:
        part.grad_scaler._hysteresis_tracker = 1
    for chunk in tiny.model:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            if getattr(parameter, "allreduce", True) != experts:
                parameter.main_grad.fill_(math.inf)
    assert tiny.optimizer.prepare_grads()
    return [float(part.get_loss_scale()) for part in parts]


def test_an_overflow_in_one_kind_lowers_the_scale_of_both(groups):
    for experts in (False, True):
        assert overflow(groups, experts=experts, patched=True) == [512.0, 512.0]


def test_megatron_still_lets_the_scales_drift_apart(groups):
    """When this fails, Megatron shares the scale by itself, and patches/shared_loss_scale.py can go."""
    assert overflow(groups, experts=True, patched=False) == [1024.0, 512.0]


def test_one_kind_of_parameters_is_left_alone(groups):
    tiny = build_tiny_gpt(groups, params_dtype=torch.float16)
    shared_loss_scale.apply(tiny.optimizer)
    assert "prepare_grads" not in vars(tiny.optimizer)
