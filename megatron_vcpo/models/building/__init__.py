"""Megatron's model configuration, and a whole model in a single CPU process."""

from megatron_vcpo.patches import modelopt_without_vllm

modelopt_without_vllm.apply()
