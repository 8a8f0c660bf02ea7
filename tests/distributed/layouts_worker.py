"""Run under torchrun: two steps of every policy in every layout of this job, compared with one process's."""

# ruff: noqa: E402 - torch has to be patched before Megatron is imported

from __future__ import annotations

import sys
from typing import Any

from megatron_vcpo.patches import megatron_cpu

megatron_cpu.install()

import torch
import torch.distributed as dist

from megatron_vcpo.config import VCPOConfig
from tests.oracle.layouts import Layout, Policy, Trainer, build, trajectories
from tests.oracle.worker import check, worker

# fp32 on another order of summation. Measured over all layouts: metrics within 5e-6, parameters within 3e-7 where a
# step is 1e-2.
METRIC_TOLERANCE, PARAMETER_TOLERANCE = 2e-5, 1e-6

# What a layout differs in by its nature.
_OF_THE_LAYOUT = {"n_micro_batches", "packing_efficiency", "packing_balance"}

GROUPS_TOGETHER = VCPOConfig(tokens_per_micro_batch=120)
ACROSS_MICRO_BATCHES = VCPOConfig(
    tokens_per_micro_batch=40,
    baseline_scope="minibatch",
    reward_normalization="minibatch-std",
    kl_coefficient=0.05,
    entropy_coefficient=0.01,
)
TOKEN_LEVEL = VCPOConfig(
    tokens_per_micro_batch=40, correction="token-tis", aggregation="token-mean", baseline="opob-leave-one-out"
)
POLICIES = {
    "dense": Policy(config=GROUPS_TOGETHER),
    "tied": Policy(config=ACROSS_MICRO_BATCHES, tied=True),
    "moe": Policy(config=TOKEN_LEVEL, moe=True),
    "moe_together": Policy(config=GROUPS_TOGETHER, moe=True, tied=True),
}
DENSE, MOE = ("dense", "tied"), ("moe", "moe_together")
SINGLE = (
    (Layout(budget=400), DENSE + MOE),
    (Layout(budget=40, reverse=True), DENSE + MOE),
    (Layout(recompute=True, logit_chunk=7), DENSE + MOE),
)
TWO = (
    (Layout(tp=2), DENSE),  # Megatron wants sequence parallelism beside experts
    (Layout(tp=2, sp=True, logit_chunk=10), DENSE + MOE),
    (Layout(pp=2), DENSE + MOE),
    (Layout(pp=2, vpp=2), DENSE + MOE),
    (Layout(), DENSE + MOE),
    (Layout(overlap=True), DENSE),
    (Layout(distopt=True), DENSE + MOE),
    (Layout(distopt=True, overlap=True), DENSE + MOE),
    (Layout(cp=2), DENSE + MOE),
    (Layout(cp=2, distopt=True, recompute=True), DENSE),
    (Layout(ep=2), MOE),
    (Layout(ep=2, dispatcher="allgather"), MOE),
    (Layout(tp=2, sp=True, ep=2, etp=1), MOE),
    (Layout(tp=2, sp=True, recompute=True), DENSE + MOE),
    (Layout(pp=2, recompute=True), MOE),
)
FOUR = (
    (Layout(tp=2, pp=2), DENSE),
    (Layout(tp=2, sp=True, cp=2), DENSE + MOE),
    (Layout(pp=2, cp=2), DENSE),
    (Layout(cp=2), DENSE),
    (Layout(pp=2, ep=2), MOE),
    (Layout(pp=2, ep=2, dispatcher="allgather"), ("moe",)),
    (Layout(cp=2, ep=2, distopt=True), MOE),
    (Layout(tp=2, sp=True, ep=2, etp=2), MOE),
    (Layout(tp=2, sp=True, pp=2, vpp=2, ep=2, etp=1, distopt=True, overlap=True, recompute=True), ("moe",)),
)
LAYOUTS = {1: SINGLE, 2: TWO, 4: FOUR}


def run(policy: Policy, layout: Layout) -> dict[str, Any]:
    """Metrics of two steps, the second of them stale, and the weights after it."""
    config = VCPOConfig(**{**vars(policy.config), "logit_chunk": layout.logit_chunk})
    config.tokens_per_micro_batch = layout.budget or config.tokens_per_micro_batch
    trainer: Trainer = build(Policy(**{**vars(policy), "config": config}), layout)
    batches = [trajectories(seed) for seed in (0, 1)]
    if layout.reverse:
        batches = [batch[::-1] for batch in batches]
    metrics = [trainer.train(batch, lag=float(lag)) for lag, batch in enumerate(batches)]
    return {"metrics": metrics, "weights": trainer.weights()}


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Every metric and every parameter; the learning rate and all else that ranks share to the bit."""
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, ours["metrics"])
    assert all(row == rows[0] for row in rows), "metrics differ between ranks"
    for mine, expected in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert mine.keys() == expected.keys(), mine.keys() ^ expected.keys()
        assert mine["skipped"] == 0.0
        for name in mine.keys() - _OF_THE_LAYOUT:
            error = abs(mine[name] - expected[name]) / max(abs(expected[name]), 1e-3)
            assert error < METRIC_TOLERANCE, (name, mine[name], expected[name])
    for name, expected in theirs["weights"].items():
        error = float((ours["weights"][name] - expected).abs().max())
        assert error < PARAMETER_TOLERANCE, (name, error)


def main() -> None:
    reference = torch.load(sys.argv[1])
    with worker():
        for layout, names in LAYOUTS[dist.get_world_size()]:
            for name in names:
                with check(f"{name} with {layout}"):
                    compare(run(POLICIES[name], layout), reference[name])


if __name__ == "__main__":
    main()
