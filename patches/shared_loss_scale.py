"""FP16 with experts: Megatron gives dense and expert parameters separate loss scalers, which drift apart.

The loss is multiplied only by the first scaler's factor, but each scaler checks the gradients of its own parameters. So
an overflow in one kind lowers only one factor, and from then on one kind's gradients are divided by another number than
the loss was multiplied by. Nothing fails, but the gradient norm and its clipping are wrong.

Versions: megatron-core 0.19.2 (ChainedOptimizer.prepare_grads). Applied to one optimizer, on every device.
"""

from __future__ import annotations

import types
from typing import Any


def apply(optimizer: Any) -> None:
    """Let all scalers of a ChainedOptimizer back off together; does nothing if there are fewer than two."""
    parts = getattr(optimizer, "chained_optimizers", [])
    if len(parts) > 1 and all(getattr(part, "grad_scaler", None) is not None for part in parts):
        optimizer.prepare_grads = types.MethodType(_prepare_grads, optimizer)


def _prepare_grads(self: Any) -> bool:
    overflows = [part.prepare_grads() for part in self.chained_optimizers]  # each scaler checks and updates only itself
    if any(overflows):
        lowered = self.chained_optimizers[overflows.index(True)].grad_scaler.state_dict()
        for part in self.chained_optimizers:
            part.grad_scaler.load_state_dict(lowered)
    return any(overflows)
