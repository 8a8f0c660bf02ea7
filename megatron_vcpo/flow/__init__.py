"""The loop over optimizer steps. Begin with colocated.py, which has the picture and the iteration.

loop         what every loop shares: training, settling, logging, state
colocated    rollouts: engines and trainer take turns; assembly builds its parts
supervised   the environment's answers in place of rollouts
buffer       trajectories that wait for their step
publisher    sends weights to the engine, and proves that they arrived
trainer      one call of Megatron's train_step; feed: the iterator from which Megatron takes micro-batches
routes       the trainer's own routes for replay, and the mismatch with and without replay
evaluation, journal (metrics), resume (saved state), policy_model (the model's description)
"""

from megatron_vcpo.patches import modelopt_without_vllm

modelopt_without_vllm.apply()
