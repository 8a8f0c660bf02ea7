"""The loop over optimizer steps. Begin with colocated.py: it holds the picture and the iteration.

loop         what every loop shares: training, settling, logging, state
colocated    rollouts, engines and trainer taking turns; assembly builds its parts
supervised   the environment's answers in place of rollouts
buffer       trajectories that wait for their step
publisher    weights to the engine, and the proof that they arrived
trainer      one call of Megatron's train_step; feed: what Megatron reads its micro-batches from
routes       routers' replay between a rollout phase and the buffer
evaluation, journal, resume, policy_model
"""
