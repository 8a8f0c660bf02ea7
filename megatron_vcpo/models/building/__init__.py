"""Megatron's model configuration, and a whole model in a single CPU process."""
