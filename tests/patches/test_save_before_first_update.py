"""What is saved of an optimizer that has not stepped yet."""

from __future__ import annotations

import pytest
import torch

from megatron_vcpo.patches import save_before_first_update
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import build_tiny_gpt


@pytest.fixture(scope="module")
def groups():
    with single_process_megatron() as collection:
        save_before_first_update.apply()
        yield collection


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_optimizer_that_never_stepped_is_saved_with_zero_moments(groups, dtype):
    tiny = build_tiny_gpt(groups, params_dtype=dtype)
    (part,) = tiny.optimizer.chained_optimizers
    saved = part.sharded_state_dict(tiny.model[0].sharded_state_dict())
    assert saved.get("optimizer", saved)["state"]["common_step"] == 0.0
    states = part.optimizer.state.values()
    assert len(states) == len(tiny.parameters())
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in states)
    assert not any(value.any() for state in states for value in state.values())


def test_megatron_still_saves_no_moments_before_the_first_step(groups):
    """When this fails, Megatron does it by itself, and patches/save_before_first_update.py can go."""
    tiny = build_tiny_gpt(groups, params_dtype=torch.float16)
    (part,) = tiny.optimizer.chained_optimizers
    saved = type(part).sharded_state_dict.__wrapped__(part, tiny.model[0].sharded_state_dict())
    assert saved["optimizer"]["state"] == {}
