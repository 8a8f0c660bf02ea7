"""Megatron's model configuration, and a whole model on one CPU process."""
