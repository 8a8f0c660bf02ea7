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
    """Save and load the zero moments of an optimizer that never stepped. Idempotent."""
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    for cls in (Float16OptimizerWithFloat16Params, FP32Optimizer):
        if not hasattr(cls.sharded_state_dict, "__wrapped__"):
            cls.sharded_state_dict = _with_moments(cls.sharded_state_dict)
            cls.load_state_dict = _with_step(cls.load_state_dict)


def _with_moments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_stub_optimizer and not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
            _add_step(self.optimizer)
        return original(self, *args, **kwargs)

    return sharded_state_dict


def _with_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not self.is_stub_optimizer:
            _add_step(self.optimizer)
        return result

    return load_state_dict


def _add_step(optimizer: Any) -> None:
    # Fused optimizers keep one count for each group, and make it themselves.
    if isinstance(optimizer, torch.optim.Adam):
        for state in optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))
