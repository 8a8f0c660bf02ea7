"""Random minibatches for the objective's tests: oracle samples, and the same packed into LossInputs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.objective import LossInputs, LossOutputs, advantage_scales, vcpo_loss
from tests.oracle.estimator import Sample, Settings

GARBAGE = (math.nan, math.inf, -math.inf, 1e30)


def random_samples(seed: int, *, groups: int = 3, spread: float = 0.5, max_length: int = 6) -> list[Sample]:
    """Trajectories of groups of unequal size in random order, some empty; log-ratios of about `spread`."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        for _ in range(int(rng.integers(1, 5))):
            length = int(rng.integers(0, max_length + 1))
            policy = -rng.exponential(1.0, length)
            samples.append(
                Sample(
                    policy=policy,
                    behavior=policy - spread * rng.standard_normal(length),
                    reward=float(rng.standard_normal()),
                    group=int(group * 1000 - 7),
                    energy=rng.uniform(0.01, 1.9, length),
                    reference=policy - 0.3 * rng.standard_normal(length),
                    entropy=rng.uniform(0.0, 3.0, length),
                )
            )
    order = rng.permutation(len(samples))
    return [samples[i] for i in order]


def config_of(settings: Settings) -> VCPOConfig:
    return VCPOConfig(
        correction=settings.correction,
        correction_lower=settings.lower,
        correction_upper=settings.upper,
        veto_ratio=settings.veto,
        baseline=settings.baseline,
        baseline_scope=settings.scope,
        energy=settings.energy,
        reward_normalization=settings.normalization,
        aggregation=settings.aggregation,
        kl_coefficient=settings.kl,
        kl_estimator=settings.kl_estimator,
        entropy_coefficient=settings.entropy,
    )


def pack(
    samples: list[Sample],
    settings: Settings,
    *,
    whole: list[Sample] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    prompt: int = 2,
    padding: int = 3,
    baselines: torch.Tensor | None = None,
    **changes: Any,
) -> LossInputs:
    """LossInputs of one micro-batch holding `samples` of the minibatch `whole` (default: all of it).

    Every trajectory starts with `prompt` masked-out positions, more are strewn between its tokens, and `padding` more
    follow the last one; all of them hold NaN, inf or huge numbers.
    """
    whole = samples if whole is None else whole
    rng = np.random.default_rng(seed)
    columns: dict[str, list[float]] = {name: [] for name in ("policy", "behavior", "energy", "reference", "entropy")}
    mask: list[bool] = []
    bounds = [0]

    def garbage(count: int) -> None:
        for _ in range(count):
            mask.append(False)
            for values in columns.values():
                values.append(GARBAGE[int(rng.integers(len(GARBAGE)))])

    for sample in samples:
        garbage(prompt)
        for t in range(sample.length):
            mask.append(True)
            for name, values in columns.items():
                values.append(float(getattr(sample, name)[t]))
            if prompt:
                garbage(int(rng.integers(0, 2)))
        bounds.append(len(mask))
    garbage(padding)
    column = {name: torch.tensor(values, dtype=dtype) for name, values in columns.items()}
    rewards = torch.tensor([s.reward for s in whole], dtype=torch.float64)
    groups = torch.tensor([s.group for s in whole], dtype=torch.int64)
    position = {id(s): i for i, s in enumerate(whole)}
    here = torch.tensor([position[id(s)] for s in samples], dtype=torch.int64)
    inputs = LossInputs(
        policy_logprobs=column["policy"].requires_grad_(),
        behavior_logprobs=column["behavior"],
        mask=torch.tensor(mask, dtype=torch.bool),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        rewards=rewards[here],
        group_ids=groups[here],
        advantage_scales=advantage_scales(rewards, groups, settings.normalization)[here],
        num_trajectories=float(len(whole)),
        num_tokens=float(sum(s.length for s in whole)),
        max_response_length=settings.max_length,
        config=config_of(settings),
        token_energies=column["energy"] if settings.energy == "logit" else None,
        baselines=None if baselines is None else baselines[here],
        reference_logprobs=column["reference"] if settings.kl else None,
        entropy=column["entropy"].requires_grad_() if settings.entropy else None,
    )
    return replace(inputs, **changes) if changes else inputs


def per_trajectory(values: torch.Tensor, inputs: LossInputs) -> list[np.ndarray]:
    """The masked-in entries of values [T], one array for each trajectory."""
    bounds = inputs.cu_seqlens.tolist()
    return [values[a:b][inputs.mask[a:b]].numpy() for a, b in pairwise(bounds)]


def loss_and_gradient(inputs: LossInputs) -> tuple[LossOutputs, torch.Tensor]:
    """Loss, and its gradient [T] with respect to the policy log-probs."""
    outputs = vcpo_loss(inputs)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.policy_logprobs, retain_graph=True)
    return outputs, gradient
