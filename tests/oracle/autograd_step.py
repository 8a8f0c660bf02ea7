"""One optimizer step in fp64 by plain autograd, one trajectory after the other, on one process: the oracle of steps.

Weights, baselines and scales come from tests/oracle/estimator.py, the model from tests/oracle/plain_gpt.py; nothing
here comes from the code under test but two records, Trajectory and VCPOConfig. The rule for what is not finite is
kept by construction: a trajectory with a number that is not finite is taken out before anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.data.trajectory import Trajectory
from tests.oracle import estimator
from tests.oracle.estimator import Sample, Settings
from tests.oracle.plain_gpt import PlainGPT, Weights

EXPONENTS = {"off": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One trajectory under the policy: its sampled tokens, L of them, in fp64."""

    trajectory: Trajectory
    policy: Tensor  # [L] log-probs, with their graph
    entropy: Tensor  # [L] with its graph
    logit_energy: Tensor  # [L] ||onehot - softmax||^2
    reference: Tensor  # [L] log-probs of the frozen weights

    @property
    def behavior(self) -> Tensor:
        """[L]."""
        return torch.from_numpy(self.trajectory.behavior_logprobs[self.trajectory.response_mask]).double()

    def is_usable(self, config: VCPOConfig) -> bool:
        """Whether every number of it that the step needs is finite."""
        numbers = [self.policy, self.behavior, torch.tensor([self.trajectory.reward])]
        numbers += [self.reference] if config.kl_coefficient > 0.0 else []
        numbers += [self.entropy] if config.entropy_coefficient != 0.0 else []
        return all(bool(torch.isfinite(values).all()) for values in numbers)

    @property
    def sample(self) -> Sample:
        """The same as numpy arrays, without graphs."""
        return Sample(
            policy=self.policy.detach().numpy(),
            behavior=self.behavior.numpy(),
            reward=float(np.float32(self.trajectory.reward)),
            group=self.trajectory.group_id,
            energy=self.logit_energy.numpy(),
            reference=self.reference.numpy(),
            entropy=self.entropy.detach().numpy(),
        )


@dataclass(kw_only=True)
class Step:
    """What a step is expected to be; lists are over the usable trajectories."""

    metrics: dict[str, float]
    usable: list[int]  # indices in the minibatch
    baselines: list[float] = field(default_factory=list)
    log_weights: list[float] = field(default_factory=list)  # lam_i
    energies: list[float] = field(default_factory=list)  # E_i, of an optimal baseline
    loss: float = math.nan  # with KL penalty and entropy bonus
    loss_size: float = 0.0  # sum of the token terms' absolute values, of which the loss may be a small remainder
    margin: float = math.inf  # least distance of a log-ratio from the logarithm of a bound
    gradients: Weights = field(default_factory=dict)  # before clipping
    skipped: bool = False

    def clipped(self, largest: float) -> Weights:
        """The gradients, their common norm brought down to `largest`, as Megatron does it."""
        factor = min(1.0, largest / (self.metrics["grad_norm"] + 1e-6))
        return {name: factor * g for name, g in self.gradients.items()}


def adam_change(gradient: Tensor, rate: float, epsilon: float) -> Tensor:
    """What Adam's first step adds to a weight: both moments, corrected for their start at zero, are the gradient's."""
    return -rate * gradient / (gradient.abs() + epsilon)


def score(model: PlainGPT, weights: Weights, frozen: Weights, trajectory: Trajectory) -> Scored:
    """One forward pass of the policy, and one of the frozen weights."""
    ids = torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids])).long()
    rows = torch.from_numpy(np.flatnonzero(trajectory.response_mask)) + len(trajectory.prompt_ids) - 1
    targets = ids[rows + 1]
    log_pi = torch.log_softmax(model.logits(weights, ids)[rows], -1)
    pi = log_pi.detach().exp()
    onehot = torch.nn.functional.one_hot(targets, model.vocab)
    with torch.no_grad():
        reference = torch.log_softmax(model.logits(frozen, ids)[rows], -1)
    return Scored(
        trajectory=trajectory,
        policy=log_pi.gather(1, targets[:, None])[:, 0],
        entropy=-(log_pi.exp() * log_pi).sum(-1),
        logit_energy=(onehot - pi).square().sum(-1),
        reference=reference.gather(1, targets[:, None])[:, 0],
    )


def autograd_step(
    minibatch: Sequence[Scored],
    weights: Weights,
    config: VCPOConfig,
    *,
    max_response_length: int,
    learning_rate: float,
) -> Step:
    """The step over the minibatch, with everything that does not depend on a layout.

    Args:
        minibatch: all trajectories, unusable ones too.
        weights: of the policy, those that the trajectories were scored with.
        config: the objective.
        max_response_length: L_max.
        learning_rate: the schedule's own.
    """
    usable = [i for i, s in enumerate(minibatch) if s.is_usable(config)]
    scored = [minibatch[i] for i in usable]
    settings = _settings(config, max_response_length)
    samples = [s.sample for s in scored]
    log_weights = [s.log_weight for s in samples]
    rho, multiplier = _rho_and_multiplier(log_weights, config, settings)
    metrics = {
        "rho": rho,
        "lr_multiplier": multiplier,
        "lr": learning_rate * multiplier,
        "nonfinite_trajectories": 1.0 - len(usable) / len(minibatch),
    }
    if not usable:
        return Step(metrics=metrics, usable=usable, skipped=True)
    energies, baselines, fallbacks = _baselines(scored, samples, weights, config, settings)
    scales = estimator.scales(samples, settings)
    terms = _loss_terms(scored, samples, baselines, scales, settings)
    loss = terms["policy"]
    loss = loss + config.kl_coefficient * terms["kl"] if config.kl_coefficient else loss
    loss = loss - config.entropy_coefficient * terms["entropy"] if config.entropy_coefficient else loss
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), retain_graph=True)))
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    return Step(
        metrics={
            **metrics,
            **_means(samples, baselines, scales, settings, config),
            "pg_loss": float(terms["policy"].detach()),
            "grad_norm": norm,
            "vetoed": sum(estimator.is_vetoed(s, settings) for s in samples) / len(minibatch),
            "baseline_fallbacks": sum(fallbacks) / len(minibatch),
        },
        usable=usable,
        baselines=baselines,
        log_weights=log_weights,
        energies=energies,
        loss=float(loss.detach()),
        loss_size=float(terms["size"].detach()),
        margin=min((_margin(s, settings) for s in samples), default=math.inf),
        gradients=gradients,
    )


def _settings(config: VCPOConfig, max_response_length: int) -> Settings:
    return Settings(
        correction=config.correction,
        lower=config.correction_lower,
        upper=config.correction_upper,
        veto=config.veto_ratio,
        baseline=config.baseline,
        scope=config.baseline_scope,
        energy=config.energy,
        normalization=config.reward_normalization,
        aggregation=config.aggregation,
        kl=config.kl_coefficient,
        kl_estimator=config.kl_estimator,
        entropy=config.entropy_coefficient,
        max_length=max_response_length,
    )


def _rho_and_multiplier(log_weights: list[float], config: VCPOConfig, settings: Settings) -> tuple[float, float]:
    if config.ess_weights == "capped":
        log_weights = [min(lam, math.log(estimator.bounds(settings)[1])) for lam in log_weights]
    rho = estimator.effective_sample_size(log_weights)
    exponent = EXPONENTS[config.ess_scaling]
    return rho, estimator.multiplier(rho, float(config.ess_reference), exponent, config.ess_floor)


def _baselines(
    scored: list[Scored], samples: list[Sample], weights: Weights, config: VCPOConfig, settings: Settings
) -> tuple[list[float], list[float], list[bool]]:
    """Energies E_i (of an optimal baseline), baselines, and which of them are means for want of an energy."""
    if not config.baseline.startswith("opob"):
        return [], estimator.baselines(samples, settings), [False] * len(samples)
    energies = [_energy(s, x, weights, settings) for s, x in zip(scored, samples)]
    # e_i, the squared norm of what multiplies (R - b): the weight of a sequence and the length normalizer come in.
    pulls = [
        (_sequence_weight(x, settings) * estimator.normalizer(x, samples, settings)) ** 2 * e
        for x, e in zip(samples, energies)
    ]
    groups = [0 if config.baseline_scope == "minibatch" else s.group for s in samples]
    alone = config.baseline.endswith("leave-one-out")
    baselines = estimator.weighted_baseline([s.reward for s in samples], pulls, groups, alone)
    peers = [
        [e for j, e in enumerate(pulls) if groups[j] == groups[i] and not (alone and j == i)]
        for i in range(len(samples))
    ]
    return energies, baselines, [not any(others) for others in peers]


def _sequence_weight(sample: Sample, settings: Settings) -> float:
    """a_i of a correction with one weight for a trajectory; 1 where each token has its own."""
    if estimator.TABLE[settings.correction][0] or not sample.length:
        return 1.0
    return float(estimator.token_weights(sample, settings)[0])


def _energy(scored: Scored, sample: Sample, weights: Weights, settings: Settings) -> float:
    """E_i: sum_t a_t^2 E_t, or || grad sum_t a_t log p_t ||^2 over all parameters; a_t = 1 for a sequence's weight."""
    if not sample.length or estimator.is_vetoed(sample, settings):
        return 0.0
    per_token = estimator.TABLE[settings.correction][0]
    applied = estimator.token_weights(sample, settings) if per_token else np.ones(sample.length)
    if settings.energy != "exact":
        return float((applied**2 * (sample.energy if settings.energy == "logit" else 1.0)).sum())
    target = (torch.from_numpy(applied) * scored.policy).sum()
    gradients = torch.autograd.grad(target, list(weights.values()), retain_graph=True, allow_unused=True)
    return sum(float(g.square().sum()) for g in gradients if g is not None)


def _loss_terms(
    scored: list[Scored], samples: list[Sample], baselines: list[float], scales: list[float], settings: Settings
) -> dict[str, Tensor]:
    """Sums over all sampled tokens, their shares in the loss included, and the sum of the policy's absolute values."""
    terms = {name: torch.zeros((), dtype=torch.float64) for name in ("policy", "kl", "entropy", "size")}
    for s, sample, baseline, scale in zip(scored, samples, baselines, scales):
        share = estimator.normalizer(sample, samples, settings) / len(samples)
        advantage = 0.0 if estimator.is_vetoed(sample, settings) else (sample.reward - baseline) * scale
        objective = _objective(s, sample, advantage, settings)
        terms["policy"] = terms["policy"] - share * objective.sum()
        terms["size"] = terms["size"] + share * objective.abs().sum()
        terms["kl"] = terms["kl"] + share * _kl(s, settings.kl_estimator).sum()
        terms["entropy"] = terms["entropy"] + share * s.entropy.sum()
    return terms


def _objective(scored: Scored, sample: Sample, advantage: float, settings: Settings) -> Tensor:
    """[L]: a A log p with constant a, or min(r A, clip(r) A) with the gradient through r."""
    if settings.correction not in ("gspo", "ppo-clip"):
        return torch.from_numpy(estimator.token_weights(sample, settings)) * advantage * scored.policy
    log_ratio = scored.policy - scored.behavior
    if settings.correction == "gspo":
        log_ratio = log_ratio.mean().expand_as(log_ratio) if sample.length else log_ratio
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantage, ratio.clamp(*estimator.bounds(settings)) * advantage)


def _kl(scored: Scored, estimator_name: str) -> Tensor:
    log_ratio = scored.policy - scored.reference
    return {"k1": log_ratio, "k2": log_ratio.square() / 2, "k3": torch.expm1(-log_ratio) + log_ratio}[estimator_name]


def _margin(sample: Sample, settings: Settings) -> float:
    """How far rounding may move the log-ratios of a sample before a bound or the veto decides otherwise."""
    token = sample.policy - sample.behavior
    per_token, kind, _ = estimator.TABLE[settings.correction]
    whole = math.log(sample.geometric) if settings.correction in ("geometric-mis", "gspo") else sample.log_weight
    limits = [x for x in estimator.bounds(settings) if kind != "one" and 0.0 < x < math.inf]
    pairs = [(ratio, limit) for limit in limits for ratio in (token if per_token else [whole] * bool(sample.length))]
    pairs += [(ratio, settings.veto) for ratio in token if settings.veto]
    return min((abs(ratio - math.log(limit)) for ratio, limit in pairs), default=math.inf)


def _means(
    samples: list[Sample], baselines: list[float], scales: list[float], settings: Settings, config: VCPOConfig
) -> dict[str, float]:
    """Metrics that are means over trajectories or sampled tokens (docs/metrics.md)."""
    per_token = estimator.TABLE[settings.correction][0]
    applied, outside = [], []
    for sample in samples:
        weights = estimator.token_weights(sample, settings)
        ratios = np.exp(sample.policy - sample.behavior) if per_token else _sequence_ratio(sample, settings)
        changed = weights != ratios if settings.correction != "none" else np.zeros(sample.length, bool)
        kept = weights * (not estimator.is_vetoed(sample, settings))
        count = sample.length if per_token else min(sample.length, 1)
        applied += kept[:count].tolist()
        outside += changed[:count].tolist()
    log_ratio = np.concatenate([s.policy - s.behavior for s in samples])
    means = {
        "reward": [s.reward for s in samples],
        "response_length": [s.length for s in samples],
        "baseline": baselines,
        "advantage_abs": [abs(s.reward - b) * x for s, b, x in zip(samples, baselines, scales)],
        "weight": applied,
        "weight_clipped": outside,
        "mismatch_abs": np.abs(log_ratio),
        "mismatch_k3": np.expm1(log_ratio) - log_ratio,
        "entropy": np.concatenate([s.entropy for s in samples]),
    }
    if config.kl_coefficient > 0.0:
        means["kl"] = np.concatenate([estimator.kl_terms(s, settings.kl_estimator)[0] for s in samples])
    return {name: float(np.mean(values)) for name, values in means.items()}


def _sequence_ratio(sample: Sample, settings: Settings) -> np.ndarray:
    geometric = settings.correction in ("geometric-mis", "gspo")
    return np.full(sample.length, sample.geometric if geometric else math.exp(sample.log_weight))
