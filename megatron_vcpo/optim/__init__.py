"""The parameter scheduler that lowers the learning rate when the effective sample size (ESS) falls."""

from megatron_vcpo.optim.ess_scheduler import EssParamScheduler, EssSettings

__all__ = ["EssParamScheduler", "EssSettings"]
