"""FP16 with experts: Megatron gives the dense and the expert parameters a loss scaler each, and both drift apart.

The loss is multiplied by the first scaler's factor alone, and each judges the gradients of its own parameters. An
overflow in one of the two kinds therefore lowers one factor only, and from then on the gradients of the other kind are
divided by a number that the loss was not multiplied with. Nothing fails: the gradient norm and its clipping are wrong.

Versions: megatron-core 0.19.2 (ChainedOptimizer.prepare_grads). Applied to one optimizer, on every device.
"""

from __future__ import annotations

import types
from typing import Any


def apply(optimizer: Any) -> None:
    """Let all scalers of a ChainedOptimizer back off together; does nothing where there are fewer than two."""
    parts = getattr(optimizer, "chained_optimizers", [])
    if len(parts) > 1 and all(getattr(part, "grad_scaler", None) is not None for part in parts):
        optimizer.prepare_grads = types.MethodType(_prepare_grads, optimizer)


def _prepare_grads(self: Any) -> bool:
    overflows = [part.prepare_grads() for part in self.chained_optimizers]  # each judges and updates its own
    if any(overflows):
        lowered = self.chained_optimizers[overflows.index(True)].grad_scaler.state_dict()
        for part in self.chained_optimizers:
            part.grad_scaler.load_state_dict(lowered)
    return any(overflows)
