"""Why trainer and engine disagree: score tokens with both, in every dtype, and split the difference
(docs/mismatch.md)."""

from megatron_vcpo.patches import modelopt_without_vllm

modelopt_without_vllm.apply()
