"""The ESS-aware parameter scheduler."""

from megatron_vcpo.optim.ess_scheduler import EssParamScheduler, EssSettings

__all__ = ["EssParamScheduler", "EssSettings"]
