"""Weights from Megatron to whoever receives them: plan, gather, deliver, verify (docs/sync.md).

buckets        which parameters travel together
gather         the whole model as a stream of Hugging Face tensors
synchronizer   publish(version): all of it arrives, or every rank raises
receiver       what weights are published to
deadline       no wait without an end
verify         the engine's log-probs against the trainer's
transports/    flat buckets to another process
"""
