"""Model families: names and shapes, what a checkpoint and Megatron must agree on, and how Megatron builds a model."""
