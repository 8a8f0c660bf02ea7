"""Direct queries of multi-latent attention get no norm of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vcpo.patches import megatron_cpu, mla_direct_query

megatron_cpu.install()


class Norm:
    """Stands for the norm that the local layer spec asks for."""


class Fused:
    """Stands for Transformer Engine's linear layer with a norm before it."""


def resolver(q_norm: Any, fused: Any, plain: Any) -> Any:
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    made = object.__new__(QKNormConfigResolver)
    made.config = SimpleNamespace(qk_layernorm=True, qk_l2_norm=False, q_lora_rank=None)
    made.submodules = SimpleNamespace(
        q_layernorm=q_norm,
        kv_layernorm=q_norm,
        linear_q_proj=plain,
        linear_q_up_proj=fused or plain,
        linear_kv_up_proj=fused or plain,
    )
    made.has_q_lora, made.is_dsa, made.variant_str = False, False, "MLA"
    made.qk_norm_impl, made.linear_impl, made.fused_norm_linear_impl = Norm, plain, fused
    return made


class Plain:
    """Stands for a linear layer."""


@pytest.fixture
def stock_resolve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The original method, with the patch taken off for the test."""
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver as Resolver

    if getattr(Resolver.resolve, "projects_directly", False):
        monkeypatch.setattr(Resolver, "resolve", Resolver.resolve.__closure__[-1].cell_contents)
    return Resolver.resolve


def test_stock_megatron_still_norms_direct_queries(stock_resolve: Any) -> None:
    assert stock_resolve(resolver(None, Fused, Plain))["linear_q_proj"] is Fused
    with pytest.raises(ValueError, match="q_lora_rank is None"):
        stock_resolve(resolver(Norm, None, Plain))


def test_with_the_patch_queries_are_projected_plainly_and_the_key_value_latent_keeps_its_norm(
    stock_resolve: Any,
) -> None:
    mla_direct_query.apply()
    engine = resolver(None, Fused, Plain).resolve()
    assert engine["linear_q_proj"] is Plain
    assert engine["linear_kv_up_proj"] is Fused
    local = resolver(Norm, None, Plain).resolve()
    assert (local["linear_q_proj"], local["kv_layernorm"]) == (Plain, Norm)
