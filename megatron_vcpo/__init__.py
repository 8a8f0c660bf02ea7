"""Reinforcement learning of language models on stale rollouts, as a plugin for Megatron-Core."""
