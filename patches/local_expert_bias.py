"""Experts of the local layer spec with biases (GPT-OSS) cannot be trained on one tensor-parallel rank.

Why: MLP.forward adds the scaled bias in place to the row-parallel layer's result. With one rank, that result is the
unchanged input of a custom autograd function, which torch does not allow to be changed in place.
Versions: megatron-core 0.19.2, SequentialMLP with --disable-bias-linear off.
No longer needed when `tests/patches/test_local_expert_bias.py::test_stock_experts_still_cannot_learn_biases` fails.
"""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Return a copy if the caller will add an expert's bias to it."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    stock = RowParallelLinear.forward

    def forward(self: Any, input_: Any) -> Any:
        output, bias = stock(self, input_)
        return (output if bias is None or not self.is_expert else output.clone()), bias

    forward.stock = stock  # type: ignore[attr-defined]
    RowParallelLinear.forward = forward
