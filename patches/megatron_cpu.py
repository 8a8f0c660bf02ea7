"""Megatron-Core and megatron.training on a CPU over gloo: applies the necessary patches in the right order.

    from megatron_vcpo.patches import megatron_cpu
    megatron_cpu.install()         # before the first import of megatron
    megatron_cpu.patch_megatron()  # any time after
    megatron_cpu.patch_training()  # before megatron.training.pretrain()

All three do nothing if CUDA works.
"""

from __future__ import annotations

from megatron_vcpo.patches import torch_cuda_alias

_patched: set[str] = set()


def active() -> bool:
    """Whether this process runs Megatron on the CPU."""
    return torch_cuda_alias.installed()


def install() -> None:
    """Alias 'cuda' to the CPU in torch."""
    torch_cuda_alias.install()


def patch_megatron() -> None:
    """Apply the patches of Megatron-Core. Idempotent."""
    if not active() or "core" in _patched:
        return
    _patched.add("core")
    from megatron_vcpo.patches import (
        cpu_packed_rope,
        distributed_optimizer_torch_adam,
        gloo_uneven_collectives,
        local_expert_bias,
        moe_host_splits,
        torch_norm_sequence_parallel,
    )

    moe_host_splits.apply()
    cpu_packed_rope.apply()
    distributed_optimizer_torch_adam.apply()
    gloo_uneven_collectives.apply()
    torch_norm_sequence_parallel.apply()
    local_expert_bias.apply()


def patch_training() -> None:
    """Let megatron.training.pretrain() start without CUDA. Idempotent."""
    if not active() or "training" in _patched:
        return
    _patched.add("training")
    from megatron_vcpo.patches import training_without_cuda

    training_without_cuda.apply()
