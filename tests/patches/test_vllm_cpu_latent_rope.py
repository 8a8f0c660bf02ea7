"""The rotation of one part of each query head, as latent attention asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_vcpo.patches import vllm_cpu_latent_rope

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def rotary() -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    vllm_cpu_latent_rope.apply()
    with set_current_vllm_config(VllmConfig()):
        return RotaryEmbedding(64, 64, 128, 10000.0, False, torch.float32)


def query_and_key() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(10, 4, 96, generator=generator)
    return heads[..., 32:], torch.randn(10, 1, 64, generator=generator)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Each pair of neighbouring dimensions as a complex number, turned by position times frequency, in fp64."""
    frequencies = 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2).float()


def test_with_the_patch_every_head_is_rotated_by_its_position(rotary: Any) -> None:
    query, key = query_and_key()
    expected = rotated(query), rotated(key)
    actual = rotary.forward_cpu(torch.arange(10), query, key)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_kernel_still_rotates_heads_wrongly(rotary: Any) -> None:
    query, key = query_and_key()
    expected = rotated(query)
    actual, _ = type(rotary).forward_cpu.stock(rotary, torch.arange(10), query, key)
    assert not torch.allclose(actual, expected, atol=1e-2)
