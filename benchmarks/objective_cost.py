"""Milliseconds of the objective for one minibatch (default: 16,384 trajectories, about a million packed tokens).

Ratios are relative to the cheapest possible loss on the same log-probs: their masked mean, forward and backward. Token
energies, which need logits, belong to the model's own step; step_overhead.py measures them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.objective import (
    LossInputs,
    advantage_scales,
    effective_sample_size,
    mean_baseline,
    optimal_baseline,
    sequence_log_weights,
    vcpo_loss,
)
from megatron_vcpo.objective.trajectories import trajectory_energies, trajectory_log_energies


@dataclass
class Minibatch:
    """The inputs of the loss, and those of its parts."""

    inputs: LossInputs
    log_weights: Tensor  # [n]
    log_energies: Tensor  # [n]


def make_inputs(trajectories: int, tokens: int, group: int, device: torch.device) -> LossInputs:
    """Responses of 50% to 150% of the mean length, with log-ratios as after a few steps of lag."""
    generator = torch.Generator().manual_seed(0)
    mean = tokens // trajectories
    lengths = torch.randint(mean // 2, mean + mean // 2 + 1, (trajectories,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu_seqlens[-1])
    behavior = -torch.rand(total, generator=generator) * 3.0
    group_ids = torch.arange(trajectories) // group
    rewards = torch.randint(0, 2, (trajectories,), generator=generator).float()
    config = VCPOConfig()
    policy = behavior + 0.02 * torch.randn(total, generator=generator)
    return LossInputs(
        policy_logprobs=policy.to(device).requires_grad_(True),
        behavior_logprobs=behavior.to(device),
        mask=torch.ones(total, dtype=torch.bool, device=device),
        cu_seqlens=cu_seqlens.to(device),
        rewards=rewards.to(device),
        group_ids=group_ids.to(device),
        advantage_scales=advantage_scales(rewards, group_ids, config.reward_normalization).to(device),
        num_trajectories=float(trajectories),
        num_tokens=float(total),
        max_response_length=int(lengths.max()),
        config=config,
        token_energies=torch.rand(total, generator=generator).to(device),
    )


def log_energies(inputs: LossInputs, log_weights: Tensor) -> Tensor:
    """Log-energies [n] for the optimal baseline, from the tokens' energies."""
    energies = trajectory_energies(
        policy_logprobs=inputs.policy_logprobs,
        behavior_logprobs=inputs.behavior_logprobs,
        mask=inputs.mask,
        cu_seqlens=inputs.cu_seqlens,
        token_energies=inputs.token_energies,
        config=inputs.config,
    )
    return trajectory_log_energies(
        log_weights=log_weights,
        lengths=inputs.cu_seqlens.diff(),
        energies=energies,
        config=inputs.config,
        num_trajectories=inputs.num_trajectories,
        num_tokens=inputs.num_tokens,
        max_response_length=inputs.max_response_length,
    )


def weights_of(inputs: LossInputs) -> Tensor:
    with torch.no_grad():
        return sequence_log_weights(
            inputs.policy_logprobs, inputs.behavior_logprobs, inputs.mask, inputs.cu_seqlens
        ).detach()


def ways(batch: Minibatch) -> dict[str, Callable[[], object]]:
    """The functions to measure; ratios are relative to the first."""
    inputs = batch.inputs
    policy = inputs.policy_logprobs
    with_baselines = replace(inputs, baselines=optimal_baseline(inputs.rewards, batch.log_energies, inputs.group_ids))

    def backward(loss: Tensor) -> None:
        policy.grad = None
        loss.backward()

    def plain_loss() -> None:
        kept = torch.where(inputs.mask, policy, 0.0)
        backward(-kept.sum() / inputs.mask.sum())

    return {
        "plain masked mean, forward + backward": plain_loss,
        "sequence weights": lambda: weights_of(inputs),
        "rho of the weights": lambda: effective_sample_size(batch.log_weights),
        "energies": lambda: log_energies(inputs, batch.log_weights),
        "mean baseline": lambda: mean_baseline(inputs.rewards, inputs.group_ids),
        "optimal baseline": lambda: optimal_baseline(inputs.rewards, batch.log_energies, inputs.group_ids),
        "vcpo_loss, forward": lambda: vcpo_loss(inputs),
        "vcpo_loss, forward + backward": lambda: backward(vcpo_loss(inputs).loss),
        "vcpo_loss, baselines given, forward + backward": lambda: backward(vcpo_loss(with_baselines).loss),
    }


def measure(runs: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Wall-clock milliseconds of each function, interleaved, after one warm-up round."""
    milliseconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat > 0:
                milliseconds[name].append(1000.0 * (time.perf_counter() - started))
    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="response tokens, about")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    inputs = make_inputs(options.trajectories, options.tokens, options.group, device)
    log_weights = weights_of(inputs)
    batch = Minibatch(inputs=inputs, log_weights=log_weights, log_energies=log_energies(inputs, log_weights))
    rho = float(effective_sample_size(log_weights))
    size = f"{options.trajectories} trajectories, {inputs.mask.numel()} tokens"
    print(f"{size}, {device}, {options.threads} threads, rho {rho:.3f}")
    measured = measure(ways(batch), options.repeats, device)
    base = next(iter(measured.values()))
    print(f"{'part':<48} {'ms (median)':>12} {'ms (least)':>11} {'ratio':>8}  of {options.repeats} interleaved runs")
    for name, values in measured.items():
        ratio = statistics.median(value / plain for value, plain in zip(values, base))
        print(f"{name:<48} {statistics.median(values):>12.2f} {min(values):>11.2f} {ratio:>8.2f}")


if __name__ == "__main__":
    main()
