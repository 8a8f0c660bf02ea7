"""What a run shows: metrics.jsonl and its line, samples.jsonl, TensorBoard and wandb, the picture."""
