"""Send weights from Megatron to a receiver: plan, gather, deliver, verify (docs/sync.md).

buckets        which parameters are sent together
gather         the whole model as a stream of Hugging Face tensors
synchronizer   publish(version): all weights arrive, or every rank raises
receiver       the protocol of what weights are published to
deadline       a time limit for every wait
verify         compare the engine's log-probs with the trainer's
transports/    send flat buckets to another process
"""
