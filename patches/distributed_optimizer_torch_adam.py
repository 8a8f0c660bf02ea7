"""DistributedOptimizer over torch's own Adam cannot be checkpointed: torch keeps 'step' per parameter, Apex and TE
do not.

Saving a fresh optimizer asserts on the missing 'step'; loading trips over the extra key. Versions: megatron-core
0.19.2 where neither Transformer Engine nor Apex provides the fused Adam.
"""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    """Give a fresh optimizer zero states before saving, and hide 'step' while a parameter's state is set."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    state_dict = DistributedOptimizer.state_dict

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

    DistributedOptimizer._set_main_param_and_optimizer_states = set_without_step
    DistributedOptimizer.state_dict = state_dict_with_step
