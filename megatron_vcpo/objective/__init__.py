"""The VCPO objective: pure torch on tensors, no process groups, no engine.

records      LossInputs, LossOutputs, load_loss: the interface, also of a user's own loss
segments     sums over packed trajectories and over groups
importance   sequence log-weights
ess          effective sample size and the learning-rate multiplier it gives
corrections  one function per importance correction, and their table
energy       energies that weight the optimal baseline
baseline     optimal and mean baselines, reward scales
loss         vcpo_loss
"""

from megatron_vcpo.objective.records import Loss, LossInputs, LossOutputs, load_loss

__all__ = ["Loss", "LossInputs", "LossOutputs", "load_loss"]
