"""Experts with biases learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.oracle.model_pairs import gpt_models, transformer_config
from tests.oracle.single_process import single_process_megatron


@pytest.fixture
def model() -> Iterator[Any]:
    with single_process_megatron():
        yield gpt_models(transformer_config("gpt_oss"), tied=False)[0]


def backward(model: Any) -> torch.Tensor:
    tokens = torch.arange(12)[None]
    causal = torch.triu(torch.ones(1, 1, 12, 12, dtype=torch.bool), 1)
    model(tokens, tokens, causal).square().mean().backward()
    return torch.cat([p.grad.flatten() for key, p in model.named_parameters() if key.endswith("linear_fc2.bias")])


def test_biases_of_experts_get_gradients(model: Any) -> None:
    assert bool(backward(model).abs().sum() > 0)


def test_stock_experts_still_cannot_learn_biases(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    monkeypatch.setattr(RowParallelLinear, "forward", RowParallelLinear.forward.stock)
    with pytest.raises(RuntimeError, match="modified inplace"):
        backward(model)
