"""Multi-latent attention gets a wrong norm if queries are projected directly, without latents (DeepSeek-V2-Lite,
Moonlight).

Versions: megatron-core 0.19.2. With --qk-layernorm, which the norm of the key-value latent needs, and without
--q-lora-rank, its QKNormConfigResolver inserts a norm before the query projection that these models do not have
(Transformer Engine), or refuses its own layer spec (local). No longer needed when
`tests/patches/test_mla_direct_query.py::test_stock_megatron_still_norms_direct_queries` fails.
"""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Resolve such a model's norms as if it had query latents, and project its queries without a norm. Idempotent."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    stock = QKNormConfigResolver.resolve
    if getattr(stock, "projects_directly", False):
        return

    def resolve(self: Any) -> Any:
        if self.has_q_lora or self.is_dsa or not self.config.qk_layernorm:
            return stock(self)
        self.has_q_lora = True
        try:
            classes = stock(self)
        finally:
            self.has_q_lora = False
        plain = self.submodules.linear_q_proj or self.linear_impl
        return classes | {"linear_q_proj": plain, "linear_q_up_proj": IdentityOp, "q_layernorm": IdentityOp}

    resolve.projects_directly = True  # type: ignore[attr-defined]
    QKNormConfigResolver.resolve = resolve
