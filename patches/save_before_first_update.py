"""A checkpoint written before the first optimizer step that succeeded cannot be loaded.

Under FP16 the first steps often overflow, because the loss scale starts high, and the optimizer has no moments until a
step succeeds. Megatron saves none then, but insists on them when it loads: KeyError for the first of them. It also
leaves out a step count of zero, which torch's own Adam cannot do without.

Versions: megatron-core 0.19.2, optimizers that are not distributed (those: distributed_optimizer_torch_adam.py). For
every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def apply() -> None:
    """Save the zero moments and the zero step of an optimizer that never stepped. Idempotent."""
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    for cls in (Float16OptimizerWithFloat16Params, FP32Optimizer):
        if not hasattr(cls.sharded_state_dict, "__wrapped__"):
            cls.sharded_state_dict = _with_zeros(cls.sharded_state_dict)


def _with_zeros(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Fused optimizers count steps for each group, and begin by themselves.
        per_parameter = isinstance(self.optimizer, torch.optim.Adam)
        if not self.is_stub_optimizer and not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values() if per_parameter else ():
                state["step"] = torch.tensor(0.0)
        saved = original(self, *args, **kwargs)
        if per_parameter:
            saved.get("optimizer", saved)["state"].setdefault("common_step", torch.tensor(0.0))
        return saved

    return sharded_state_dict
