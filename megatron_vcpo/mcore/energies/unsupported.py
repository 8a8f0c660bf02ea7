"""Settings under which exact energies would be wrong, refused before anything runs."""

from __future__ import annotations

from typing import Any

from megatron_vcpo.config import ConfigError

# (name of the setting, value that is supported, the flag and what to do)
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("mtp_num_layers", None, "--mtp-num-layers: heads that predict further tokens have no energies"),
    ("fp8", None, "--fp8-format: quantized rows give no exact norms"),
    ("fp4", None, "--fp4-format: quantized rows give no exact norms"),
    ("delay_wgrad_compute", False, "--delay-wgrad-compute: an energy pass computes no weight gradients"),
    ("defer_embedding_wgrad_compute", False, "--defer-embedding-wgrad-compute: it hides the output layer's inputs"),
    ("overlap_moe_expert_parallel_comm", False, "--overlap-moe-expert-parallel-comm: it runs layers in pieces"),
    ("moe_shared_expert_overlap", False, "--moe-shared-expert-overlap: it runs shared experts in pieces"),
    ("moe_latent_size", None, "--moe-latent-size: latent projections have no rule"),
    ("moe_pad_expert_input_to_capacity", False, "--moe-pad-expert-input-to-capacity: padding has no owner"),
    ("cuda_graph_impl", "none", "--cuda-graph-impl: graphs replay without hooks"),
    ("use_transformer_engine_op_fuser", False, "--use-transformer-engine-op-fuser: it hides what enters a layer"),
    ("moe_single_grouped_weight", False, "--moe-single-grouped-weight: it merges experts into one parameter"),
    ("cpu_offloading", False, "--cpu-offloading: hooks would keep what was offloaded"),
)


def require_supported(config: Any) -> None:
    """Raise ConfigError (one sentence) if exact energies do not support a transformer config or Megatron's flags."""
    for name, harmless, reason in _REFUSED:
        if getattr(config, name, harmless) not in (harmless, None, False):
            _refuse(reason)
    experts = getattr(config, "num_moe_experts", None) or getattr(config, "num_experts", None)
    if experts and config.moe_token_dispatcher_type == "flex":
        _refuse("--moe-token-dispatcher-type flex: owners of rows cannot travel through it; use alltoall")
    if experts and config.add_bias_linear:
        _refuse("biases of experts, for which there is no rule; use --disable-bias-linear")
    modules = set(config.recompute_modules or []) if config.recompute_granularity == "selective" else set()
    if modules - {"core_attn"}:
        _refuse(
            f"--recompute-modules {' '.join(sorted(modules))}: only core_attn holds no parameters; use "
            "--recompute-granularity full"
        )


def _refuse(reason: str) -> None:
    raise ConfigError(f"--vcpo-energy exact cannot work with {reason}, or choose --vcpo-energy logit.")
