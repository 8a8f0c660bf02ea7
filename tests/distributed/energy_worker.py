"""Run under torchrun: exact energies in every layout of this job, against per-trajectory autograd on one process."""

# ruff: noqa: E402 - torch has to be patched before Megatron is imported

from __future__ import annotations

import dataclasses
import sys
import time

from patches import megatron_cpu

megatron_cpu.install()

import torch
import torch.distributed as dist

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.energies.exact import ExactEnergies
from tests.oracle.energies import measure, worst_errors
from tests.oracle.layouts import VOCAB, Layout, Policy, build, init_distributed, trajectories

# fp32 is that of the model's own forward and backward (tests/mcore/test_energies.py has a milder model).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
_CONFIG = VCPOConfig(tokens_per_micro_batch=60)
_SHARED_EXPERT = {"moe_shared_expert_intermediate_size": 16}
POLICIES = {
    "dense": Policy(config=_CONFIG, dtype=torch.float64),
    "tied": Policy(config=_CONFIG, dtype=torch.float64, tied=True),
    "moe": Policy(config=_CONFIG, dtype=torch.float64, moe=True),
    "moe_tied": Policy(config=_CONFIG, dtype=torch.float64, moe=True, tied=True),
}
DENSE, MOE = ("dense", "tied"), ("moe", "moe_tied")
TWO = (
    (Layout(tp=2), DENSE),
    (Layout(tp=2, sp=True), DENSE + MOE),
    (Layout(pp=2), DENSE + MOE),
    (Layout(pp=2, vpp=2), DENSE + MOE),
    (Layout(pp=2, vpp=2, recompute=True), ("moe_tied",)),
    (Layout(), DENSE + MOE),
    (Layout(overlap=True), DENSE),
    (Layout(distopt=True), DENSE),
    (Layout(distopt=True, overlap=True), DENSE + MOE),
    (Layout(cp=2), DENSE + MOE),
    (Layout(cp=2, recompute=True), ("moe_tied",)),
    (Layout(ep=2), MOE),
    (Layout(ep=2, dispatcher="allgather"), MOE),
    (Layout(tp=2, sp=True, ep=2, etp=1), MOE),
    (Layout(tp=2, sp=True, ep=1, etp=1), MOE),
    (Layout(tp=2, sp=True, recompute=True), DENSE + MOE),
)
FOUR = (
    (Layout(tp=2, pp=2), DENSE),
    (Layout(tp=2, sp=True, pp=2), MOE),
    (Layout(pp=2, ep=2), MOE),
    (Layout(tp=2, sp=True, cp=2), DENSE + MOE),
    (Layout(cp=2, ep=2), MOE),
    (Layout(pp=2, cp=2), ("tied",)),
    (Layout(tp=2, sp=True, ep=2), MOE),
    (Layout(tp=2, sp=True, ep=2, etp=1), MOE),
    (Layout(tp=4, sp=True, ep=2, etp=1), ("moe_tied",)),
)
LAYOUTS = {1: ((Layout(), DENSE + MOE),), 2: TWO, 4: FOUR}


def check(policy: Policy, layout: Layout, expected: torch.Tensor) -> dict[str, float]:
    """The worst relative errors, of every kind of parameter and in total."""
    dtype = torch.float32 if layout.distopt else torch.float64  # the distributed optimizer takes no fp64
    trainer = build(dataclasses.replace(policy, dtype=dtype), layout)
    energies = ExactEnergies(trainer.model, trainer.groups, policy.config, torch.device("cpu"))
    measure(energies, trajectories(), packing=trainer.step.settings.packing, vocab_size=VOCAB)
    errors = worst_errors(energies.by_kind, expected)
    assert max(errors.values()) < TOLERANCE[dtype], errors
    assert not any(p.main_grad.any() for chunk in trainer.model for p in chunk.parameters()), "gradients were touched"
    return errors


def main() -> None:
    reference = torch.load(sys.argv[1])
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    torch.set_num_threads(1)
    init_distributed()
    megatron_cpu.patch_megatron()
    for layout, names in LAYOUTS[dist.get_world_size()]:
        for name in names:
            if only not in str(layout):
                continue
            started = time.perf_counter()
            try:
                errors = check(POLICIES[name], layout, reference[name])
            except Exception as error:
                error.add_note(f"rank {dist.get_rank()}: {name} with {layout}")
                raise
            if dist.get_rank() == 0:
                print(
                    f"ok {name} with {layout} ({time.perf_counter() - started:.1f} s) {max(errors.values()):.0e}",
                    flush=True,
                )
    dist.barrier()
    if dist.get_rank() == 0:
        print("all layouts passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
