"""Rollout engines: their protocol, an engine in a process of its own, and (in vllm/) vLLM in this process."""
