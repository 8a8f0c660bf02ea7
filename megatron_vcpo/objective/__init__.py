"""The VCPO objective: pure torch on tensors, no process groups, no engine.

records       LossInputs, LossOutputs, load_loss: the interface of the built-in loss and of a user's own
segments      sums over packed trajectories and over groups
usable        which trajectories can be trained on
importance    sequence log-weights
ess           effective sample size, and the learning-rate multiplier derived from it
corrections   one function per importance correction, and their table
energy        squared gradient norms, the weights of the optimal baseline
baseline      optimal and mean baselines, reward scales
advantages    a user's own advantages, in place of (reward - baseline) * scale
import_path   load a function that a flag names
trajectories  the factors of each trajectory in the gradient: normalizers, energies, baselines
kl            estimates of the divergence from a reference
batch         a micro-batch with everything unusable masked out
loss          vcpo_loss
metrics       what vcpo_loss measures besides its value
"""

from megatron_vcpo.objective.advantages import AdvantageInputs, Advantages, checked_advantages, load_advantages
from megatron_vcpo.objective.baseline import (
    BaselineResult,
    advantage_scales,
    mean_baseline,
    optimal_baseline,
    optimal_baseline_with_fallbacks,
)
from megatron_vcpo.objective.corrections import (
    CORRECTIONS,
    AppliedWeights,
    Correction,
    LogRatios,
    applied_weights,
    clip_surrogate,
    ess_log_weights,
    log_bounds,
    log_ratios,
    sequence_log_applied,
    vetoed,
)
from megatron_vcpo.objective.energy import length_energy, log_energies, logit_energy, token_logit_energy
from megatron_vcpo.objective.ess import (
    combine_ess_statistics,
    effective_sample_size,
    ess_statistics,
    learning_rate_multiplier,
)
from megatron_vcpo.objective.importance import sequence_log_weights
from megatron_vcpo.objective.kl import kl_estimate
from megatron_vcpo.objective.loss import vcpo_loss
from megatron_vcpo.objective.records import Loss, LossInputs, LossOutputs, load_loss
from megatron_vcpo.objective.segments import dense_ids, segment_ids, segment_max, segment_min, segment_sum, spread
from megatron_vcpo.objective.trajectories import (
    energy_token_weights,
    length_normalizers,
    trajectory_baselines,
    trajectory_baselines_with_fallbacks,
    trajectory_energies,
    trajectory_log_energies,
)
from megatron_vcpo.objective.usable import finite_trajectories, usable_trajectories

__all__ = [
    "CORRECTIONS",
    "AdvantageInputs",
    "Advantages",
    "AppliedWeights",
    "BaselineResult",
    "Correction",
    "LogRatios",
    "Loss",
    "LossInputs",
    "LossOutputs",
    "advantage_scales",
    "applied_weights",
    "checked_advantages",
    "clip_surrogate",
    "combine_ess_statistics",
    "dense_ids",
    "effective_sample_size",
    "energy_token_weights",
    "ess_log_weights",
    "ess_statistics",
    "finite_trajectories",
    "kl_estimate",
    "learning_rate_multiplier",
    "length_energy",
    "length_normalizers",
    "load_advantages",
    "load_loss",
    "log_bounds",
    "log_energies",
    "log_ratios",
    "logit_energy",
    "mean_baseline",
    "optimal_baseline",
    "optimal_baseline_with_fallbacks",
    "segment_ids",
    "segment_max",
    "segment_min",
    "segment_sum",
    "sequence_log_applied",
    "sequence_log_weights",
    "spread",
    "token_logit_energy",
    "trajectory_baselines",
    "trajectory_baselines_with_fallbacks",
    "trajectory_energies",
    "trajectory_log_energies",
    "usable_trajectories",
    "vcpo_loss",
    "vetoed",
]
