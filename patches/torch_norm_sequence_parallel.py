"""WrappedTorchNorm refuses sequence parallelism only because it does not mark its parameters for it.

Without the mark, their gradients are not all-reduced over the tensor-parallel ranks; with it, the module is correct.
Versions: megatron-core 0.19.2, local layer spec without Apex or Transformer Engine.
"""

from __future__ import annotations

import copy
from typing import Any


def apply() -> None:
    """Build the norm as if without sequence parallelism, then mark its parameters."""
    from megatron.core.transformer import torch_norm

    original = torch_norm.WrappedTorchNorm.__new__

    def marked(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        module = original(cls, plain, hidden_size, eps, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    torch_norm.WrappedTorchNorm.__new__ = marked
