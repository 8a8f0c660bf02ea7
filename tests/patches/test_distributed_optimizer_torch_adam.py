"""Torch's Adam under Megatron's optimizers: every parameter counts its own steps, also after a load."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import TinyGPT, build_tiny_gpt


@pytest.fixture(scope="module")
def groups():
    with single_process_megatron() as collection:
        yield collection


def update(tiny: TinyGPT, seed: int) -> None:
    """One step with gradients that follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    tiny.optimizer.zero_grad()
    for chunk in tiny.model:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    success, _, _ = tiny.optimizer.step()
    assert success


def part(tiny: TinyGPT) -> Any:
    (only,) = tiny.optimizer.chained_optimizers
    return only


def saved(tiny: TinyGPT) -> Any:
    """What a save of the optimizer in memory holds: its tensors, cloned, and the distributed optimizer's parameters."""
    state = part(tiny).state_dict()
    if hasattr(part(tiny), "get_parameter_state_dp_zero"):
        state["param_state"] = part(tiny).get_parameter_state_dp_zero()
        state["param_state_sharding_type"] = "dp_zero_gather_scatter"
    return torch.utils._pytree.tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, state)


CASES = list(itertools.product([False, True], [torch.float32, torch.float16]))


@pytest.mark.parametrize(("distributed", "dtype"), CASES)
def test_steps_after_a_load_are_those_of_an_optimizer_that_never_stopped(groups, distributed, dtype):
    settings = {"params_dtype": dtype, "distributed_optimizer": distributed}
    whole = build_tiny_gpt(groups, **settings)
    for seed in range(3):
        update(whole, seed)
    resumed = build_tiny_gpt(groups, seed=1, **settings)
    with torch.no_grad():
        for mine, other in zip(resumed.model[0].parameters(), whole.model[0].parameters(), strict=True):
            mine.copy_(other)
    part(resumed).load_state_dict(saved(whole))
    steps = [state["step"] for state in part(resumed).optimizer.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps) == len(whole.parameters())
    for seed in range(3, 6):
        update(whole, seed)
        update(resumed, seed)
    assert [state["step"].item() for state in part(resumed).optimizer.state.values()] == [6.0] * len(steps)
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


def test_stock_megatron_still_hands_one_step_to_all(groups):
    """When this fails, the part of patches/distributed_optimizer_torch_adam.py that clones the steps can go."""
    tiny = build_tiny_gpt(groups, distributed_optimizer=True)
    update(tiny, 0)
    stock = type(part(tiny)).load_state_dict.__wrapped__
    stock(part(tiny), part(tiny).state_dict())
    steps = [state["step"] for state in part(tiny).optimizer.state.values()]
    assert len({step.data_ptr() for step in steps}) == 1


def test_stock_megatron_still_cannot_save_an_optimizer_that_never_stepped(groups):
    """When this fails, the part of patches/distributed_optimizer_torch_adam.py that makes zero states can go."""
    tiny = build_tiny_gpt(groups, distributed_optimizer=True)
    with pytest.raises(AssertionError):
        type(part(tiny)).state_dict.__wrapped__(part(tiny))
    part(tiny).state_dict()
    assert {float(state["step"]) for state in part(tiny).optimizer.state.values()} == {0.0}
