"""Model families: names and shapes, what a checkpoint and Megatron have to agree on, and how Megatron builds one."""
