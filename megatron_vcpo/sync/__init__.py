"""Weights from Megatron to the engine: plan, gather, deliver, verify (docs/sync.md).

naming/          one table per model family: names, shapes, transformations
match.py         a model spread over ranks against its table
buckets.py       which parameters travel together
gather.py        the whole model as a stream of Hugging Face tensors
synchronizer.py  publish(version): all of it arrives, or every rank raises
deadline.py      no wait without an end
deliver.py       flat buckets to an engine in another process; deliver_*.py: the transports
verify.py        the engine's log-probs against the trainer's
"""
