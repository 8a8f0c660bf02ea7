"""megatron.training requires CUDA, warms up fused kernels and runs `make` for the data-set helpers.

The first two need a GPU, and the wheel contains the compiled helpers. Versions: megatron-core 0.19.2. Only installed on
the CPU.
"""

from __future__ import annotations

import functools


def apply() -> None:
    """Allow initialize_megatron without CUDA and drop the kernel warm-up and the compilation. Idempotent."""
    from megatron.training import initialize, training

    if isinstance(initialize.initialize_megatron, functools.partial):
        return
    initialize._compile_dependencies = lambda *args, **kwargs: None
    without_cuda = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    for module in (initialize, training):
        module.initialize_megatron = without_cuda
        module.set_jit_fusion_options = lambda *args, **kwargs: None
