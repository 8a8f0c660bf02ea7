"""A checkpoint written before the first successful optimizer step cannot be loaded.

Under FP16 the first steps often overflow, because the loss scale starts high, and the optimizer has no moments until a
step succeeds. Megatron then saves no moments, but requires them when it loads (KeyError). It also leaves out a step
count of zero, which torch's own Adam needs.

Versions: megatron-core 0.19.2, optimizers that are not distributed (for those see distributed_optimizer_torch_adam.py).
For every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def apply() -> None:
    """Save zero moments and a zero step for an optimizer that has never stepped. Idempotent."""
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    for cls in (Float16OptimizerWithFloat16Params, FP32Optimizer):
        if not hasattr(cls.sharded_state_dict, "__wrapped__"):
            cls.sharded_state_dict = _with_zeros(cls.sharded_state_dict)


def _with_zeros(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Fused optimizers count steps per group, and start without help.
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
