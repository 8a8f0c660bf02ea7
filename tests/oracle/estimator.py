"""The estimator once more, in numpy fp64 and plain loops: what the torch code is compared with.

Written from the formulas, with trajectories as separate arrays instead of packed tensors, and the gradient with
respect to the policy's log-probs in closed form instead of by differentiation. It does not try to be safe against
overflow; inputs on which it is compared are moderate, or -inf / NaN cases are taken out first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# name -> (per token?, kind, ratio bounds by default)
TABLE = {
    "none": (False, "one", (0.0, math.inf)),
    "token-tis": (True, "cap", (0.0, 8.0)),
    "sequence-tis": (False, "cap", (0.0, 8.0)),
    "token-mis": (True, "drop", (0.0, 8.0)),
    "sequence-mis": (False, "drop", (0.0, 8.0)),
    "geometric-mis": (False, "drop", (0.0, 2.0)),
    "icepop": (True, "drop", (0.5, 5.0)),
    "cispo": (True, "clip", (0.0, 5.0)),
    "gspo": (False, "clip", (1 - 3e-4, 1 + 4e-4)),
    "ppo-clip": (True, "clip", (0.8, 1.28)),
}
DISTANCES = ("cispo", "gspo", "ppo-clip")


@dataclass
class Sample:
    """One trajectory; arrays hold the sampled response tokens only."""

    policy: np.ndarray
    behavior: np.ndarray
    reward: float
    group: int
    energy: np.ndarray
    reference: np.ndarray | None = None
    entropy: np.ndarray | None = None

    @property
    def length(self) -> int:
        return len(self.policy)

    @property
    def log_weight(self) -> float:
        return math.fsum(self.policy - self.behavior)

    @property
    def geometric(self) -> float:
        return math.exp(self.log_weight / self.length) if self.length else 1.0


@dataclass
class Settings:
    correction: str = "sequence-tis"
    lower: float | None = None
    upper: float | None = None
    veto: float = 0.0
    baseline: str = "opob"
    scope: str = "group"
    energy: str = "logit"
    normalization: str = "group-std"
    aggregation: str = "seq-mean-token-mean"
    kl: float = 0.0
    kl_estimator: str = "k3"
    entropy: float = 0.0
    max_length: int = 16


def effective_sample_size(log_weights) -> float:
    usable = [float(x) for x in log_weights if math.isfinite(x)]
    if not usable:
        return 0.0
    top = max(usable)
    weights = np.exp(np.array(usable) - top)
    return float(weights.sum() ** 2 / (len(usable) * (weights**2).sum()))


def multiplier(rho: float, reference: float, exponent: float, floor: float) -> float:
    ratio = rho / reference
    if ratio < floor:
        ratio = floor
    if ratio > 1.0:
        ratio = 1.0
    return ratio**exponent


def bounds(settings: Settings) -> tuple[float, float]:
    low, high = TABLE[settings.correction][2]
    distance = settings.correction in DISTANCES
    if settings.lower is not None:
        low = 1 - settings.lower if distance else settings.lower
    if settings.upper is not None:
        high = 1 + settings.upper if distance else settings.upper
    return low, high


def token_weights(sample: Sample, settings: Settings) -> np.ndarray:
    """a_t for every token, of whichever level; sign-free also for the clipped surrogates."""
    per_token, kind, _ = TABLE[settings.correction]
    low, high = bounds(settings)
    ratios = np.exp(sample.policy - sample.behavior)
    if not per_token:
        geometric = settings.correction in ("geometric-mis", "gspo")
        ratios = np.full(sample.length, sample.geometric if geometric else math.exp(sample.log_weight))
    if kind == "one":
        return np.ones(sample.length)
    if kind == "cap":
        return np.array([min(r, high) for r in ratios])
    if kind == "drop":
        return np.array([r if low <= r <= high else 0.0 for r in ratios])
    return np.array([low if r < low else high if r > high else r for r in ratios])


def is_vetoed(sample: Sample, settings: Settings) -> bool:
    return any(math.exp(d) < settings.veto for d in sample.policy - sample.behavior)


def normalizer(sample: Sample, samples: list[Sample], settings: Settings) -> float:
    match settings.aggregation:
        case "seq-mean-token-mean":
            return 1.0 / sample.length if sample.length else 1.0
        case "seq-mean-token-sum":
            return 1.0
        case "seq-mean-token-sum-norm":
            return 1.0 / settings.max_length
        case "token-mean":
            return len(samples) / max(sum(s.length for s in samples), 1)
    raise AssertionError(settings.aggregation)


def energy(sample: Sample, samples: list[Sample], settings: Settings) -> float:
    if is_vetoed(sample, settings):
        return 0.0
    token = sample.energy if settings.energy == "logit" else np.ones(sample.length)
    weights = token_weights(sample, settings)
    return normalizer(sample, samples, settings) ** 2 * float((weights**2 * token).sum())


def weighted_baseline(rewards, energies, groups, leave_one_out=False) -> list[float]:
    """Optimal baseline from plain energies; NaN and inf have no weight."""
    result = []
    for i in range(len(rewards)):
        peers = [j for j in range(len(rewards)) if groups[j] == groups[i] and not (leave_one_out and j == i)]
        if not peers:
            result.append(float(rewards[i]))
            continue
        weights = [energies[j] if math.isfinite(energies[j]) else 0.0 for j in peers]
        if sum(weights) == 0.0:
            weights = [1.0] * len(peers)
        top = max(weights)
        weights = [w / top for w in weights]
        result.append(math.fsum(w * rewards[j] for w, j in zip(weights, peers)) / math.fsum(weights))
    return result


def baselines(samples: list[Sample], settings: Settings) -> list[float]:
    if settings.baseline == "none":
        return [0.0] * len(samples)
    rewards = [s.reward for s in samples]
    groups = [0 if settings.scope == "minibatch" else s.group for s in samples]
    weights = [1.0] * len(samples)
    if settings.baseline.startswith("opob"):
        weights = [energy(s, samples, settings) for s in samples]
    return weighted_baseline(rewards, weights, groups, settings.baseline.endswith("leave-one-out"))


def scales(samples: list[Sample], settings: Settings) -> list[float]:
    result = []
    for sample in samples:
        if settings.normalization == "none":
            result.append(1.0)
            continue
        wide = settings.normalization == "minibatch-std"
        rewards = [s.reward for s in samples if wide or s.group == sample.group]
        mean = math.fsum(rewards) / len(rewards)
        deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
        result.append(1.0 / deviation if max(rewards) != min(rewards) else 0.0)
    return result


def surrogate(sample: Sample, advantage: float, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Objective of every token, and its derivative with respect to that token's policy log-prob."""
    weights = token_weights(sample, settings)
    if settings.correction not in ("gspo", "ppo-clip"):
        return weights * advantage * sample.policy, weights * advantage
    low, high = bounds(settings)
    value, slope = np.zeros(sample.length), np.zeros(sample.length)
    for t, d in enumerate(sample.policy - sample.behavior):
        ratio = math.exp(d) if settings.correction == "ppo-clip" else sample.geometric
        clipped = min(max(ratio, low), high)
        value[t] = min(ratio * advantage, clipped * advantage)
        # Where the minimum is the unclipped product, d/dp of ratio * A (gspo: the share of this token, L * d/dp).
        slope[t] = ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
    return value, slope


def kl_terms(sample: Sample, estimator: str) -> tuple[np.ndarray, np.ndarray]:
    """KL estimate of every token and its derivative with respect to the policy log-prob."""
    log_ratio = sample.policy - sample.reference
    match estimator:
        case "k1":
            return log_ratio, np.ones(sample.length)
        case "k2":
            return log_ratio**2 / 2, log_ratio
        case "k3":
            return np.exp(-log_ratio) - 1 + log_ratio, 1 - np.exp(-log_ratio)
    raise AssertionError(estimator)


def minibatch(samples: list[Sample], settings: Settings) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
    """Loss of the whole minibatch, its gradient by policy log-probs, and that by entropies, for every trajectory."""
    loss, gradients, entropy_gradients = 0.0, [], []
    for sample, baseline, scale in zip(samples, baselines(samples, settings), scales(samples, settings)):
        share = normalizer(sample, samples, settings) / len(samples)
        advantage = 0.0 if is_vetoed(sample, settings) else (sample.reward - baseline) * scale
        value, slope = surrogate(sample, advantage, settings)
        value, slope = -value, -slope
        if settings.kl:
            kl, kl_slope = kl_terms(sample, settings.kl_estimator)
            value, slope = value + settings.kl * kl, slope + settings.kl * kl_slope
        if settings.entropy:
            value = value - settings.entropy * sample.entropy
        loss += share * float(value.sum())
        gradients.append(share * slope)
        entropy_gradients.append(np.full(sample.length, -share * settings.entropy))
    return loss, gradients, entropy_gradients
