"""DistributedOptimizer with torch's own Adam cannot be checkpointed: unlike Apex and TE, torch keeps 'step' per
parameter.

Saving a fresh optimizer fails an assertion on the missing 'step'. Loading fails on the extra key, and would give all
parameters the same tensor 'step', which each of them increments: with three parameters, three steps count as nine.

Versions: megatron-core 0.19.2 if neither Transformer Engine nor Apex provides the fused Adam, on every device.
Upstream: `DistributedOptimizer.load_state_dict`, which clones the step only for its HybridDeviceOptimizer. No longer
needed when the tests of stock Megatron in `tests/patches/test_distributed_optimizer_torch_adam.py` fail.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def apply() -> None:
    """Give a fresh optimizer zero states before saving, hide 'step' while a parameter's state is set, and give each
    parameter its own 'step' after loading. Idempotent; does nothing if the fused Adam is available."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    state_dict = DistributedOptimizer.state_dict
    load_state_dict = DistributedOptimizer.load_state_dict
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(load_state_dict, "__wrapped__"):
        return

    @functools.wraps(set_states)
    def set_without_step(self: Any, model_param: Any, *args: Any, **kwargs: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step", None)
        try:
            with torch.no_grad():
                set_states(self, model_param, *args, **kwargs)
        finally:
            if step is not None:
                state["step"] = step

    @functools.wraps(state_dict)
    def state_dict_with_step(self: Any) -> Any:
        if not self.is_stub_optimizer and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter.data),
                        "exp_avg_sq": torch.zeros_like(parameter.data),
                    }
        return state_dict(self)

    @functools.wraps(load_state_dict)
    def load_with_own_steps(self: Any, *args: Any, **kwargs: Any) -> None:
        load_state_dict(self, *args, **kwargs)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = set_without_step
    DistributedOptimizer.state_dict = state_dict_with_step
    DistributedOptimizer.load_state_dict = load_with_own_steps
