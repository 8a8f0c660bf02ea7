"""What a run records: metrics.jsonl, a line per iteration, samples.jsonl, TensorBoard and wandb, the picture."""
