"""Experts of the local layer spec with biases (GPT-OSS) cannot be trained on one tensor-parallel rank.

Why: MLP.forward adds the scaled bias in place to what the row-parallel layer returns. With one rank that is its input
as it is, through a custom autograd function, whose result may not be changed in place; torch raises.
Versions: megatron-core 0.19.2, SequentialMLP with --disable-bias-linear off.
No longer needed when `tests/patches/test_local_expert_bias.py::test_stock_experts_still_cannot_learn_biases` fails.
"""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Hand the caller a copy where it is going to add a bias of an expert."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    stock = RowParallelLinear.forward

    def forward(self: Any, input_: Any) -> Any:
        output, bias = stock(self, input_)
        return (output if bias is None or not self.is_expert else output.clone()), bias

    forward.stock = stock  # type: ignore[attr-defined]
    RowParallelLinear.forward = forward
