"""Run under torchrun: exact energies, and steps with them, in every layout of this job against one process's."""

# ruff: noqa: E402 - torch has to be patched before Megatron is imported

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from megatron_vcpo.patches import megatron_cpu

megatron_cpu.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.energies.exact import ExactEnergies
from megatron_vcpo.mcore.packed_minibatch import PackingSettings
from megatron_vcpo.mcore.packing import RowAlignment
from tests.distributed.layouts_worker import compare, run
from tests.oracle.energies import measure, variant_model, worst_errors
from tests.oracle.layouts import VOCAB, Layout, Policy, build, trajectories
from tests.oracle.worker import check, worker

# fp32 is that of the model's own forward and backward (tests/mcore/test_energies.py has a milder model).
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
_CONFIG = VCPOConfig(tokens_per_micro_batch=60)
POLICIES = {
    "dense": Policy(config=_CONFIG, dtype=torch.float64),
    "tied": Policy(config=_CONFIG, dtype=torch.float64, tied=True),
    "moe": Policy(config=_CONFIG, dtype=torch.float64, moe=True),
    "moe_tied": Policy(config=_CONFIG, dtype=torch.float64, moe=True, tied=True),
}
DENSE, MOE = ("dense", "tied"), ("moe", "moe_tied")
TWO = (
    (Layout(tp=2), DENSE),
    (Layout(tp=2, sp=True), ("dense", "moe_tied")),
    (Layout(tp=2, sp=True, logit_chunk=10), ("tied",)),
    (Layout(tp=2, sp=True, recompute=True), ("tied", "moe")),
    (Layout(pp=2), ("dense", "moe_tied")),
    (Layout(pp=2, vpp=2, logit_chunk=7), ("tied", "moe")),
    (Layout(pp=2, vpp=2, recompute=True), ("moe_tied",)),
    (Layout(overlap=True), ("moe_tied",)),
    (Layout(distopt=True), ("dense",)),
    (Layout(distopt=True, overlap=True), ("tied", "moe")),
    (Layout(cp=2), ("dense", "moe")),
    (Layout(cp=2, recompute=True, logit_chunk=7), ("moe_tied",)),
    (Layout(ep=2), MOE),
    (Layout(ep=2, dispatcher="allgather"), ("moe",)),
    (Layout(tp=2, sp=True, ep=2, etp=1), ("moe_tied",)),
    (Layout(tp=2, sp=True, ep=1, etp=1), MOE),
)
FOUR = (
    (Layout(tp=2, pp=2), ("tied",)),
    (Layout(tp=2, sp=True, pp=2), ("moe_tied",)),
    (Layout(pp=2, ep=2), ("moe_tied",)),
    (Layout(tp=2, cp=2), DENSE),
    (Layout(tp=2, sp=True, cp=2), ("tied", "moe")),
    (Layout(cp=2, ep=2), ("moe_tied",)),
    (Layout(pp=2, cp=2), ("tied",)),
    (Layout(tp=2, sp=True, ep=2), ("moe",)),
    (Layout(tp=2, sp=True, ep=2, etp=1), ("moe_tied",)),
    (Layout(tp=4, sp=True, ep=2, etp=1), ("moe_tied",)),
)
LAYOUTS = {2: TWO, 4: FOUR}

_PENALTIES = {"kl_coefficient": 0.05, "entropy_coefficient": 0.01}
_MINIBATCH = {"baseline_scope": "minibatch", "reward_normalization": "minibatch-std"}


def _steps(method: str, *, tokens: int, moe: bool = False, tied: bool = False, **settings: Any) -> Policy:
    config = VCPOConfig(energy="exact", energy_method=method, tokens_per_micro_batch=tokens, **settings)
    return Policy(config=config, moe=moe, tied=tied)


STEPS = {
    "two-pass": _steps("two-pass", tokens=40, moe=True),
    "deferred, groups together": _steps("deferred", tokens=120, tied=True),
    "deferred": _steps("deferred", tokens=40, moe=True, **_PENALTIES),
    "accumulators": _steps("accumulators", tokens=40, moe=True, tied=True, **_MINIBATCH),
}
VARIANTS_OF_TWO = (
    ("layer-norm-and-biases", False),
    ("layer-norm-and-biases", True),
    ("query-and-key-norms", False),
    ("query-and-key-norms", True),
    ("gated-shared-expert", True),
)
STEP_LAYOUTS = {
    2: (
        (Layout(tp=2, sp=True), ("deferred, groups together", "accumulators")),
        (Layout(pp=2, vpp=2), tuple(STEPS)),
        (Layout(distopt=True, overlap=True), tuple(STEPS)),
        (Layout(cp=2), ("deferred, groups together", "accumulators")),
        (Layout(ep=2, distopt=True), ("two-pass", "deferred", "accumulators")),
        (Layout(tp=2, sp=True, etp=1), ("deferred",)),
    ),
    4: (
        (
            Layout(tp=2, sp=True, pp=2, ep=2, etp=1, distopt=True, overlap=True, recompute=True),
            ("deferred", "accumulators"),
        ),
    ),
}


def check_energies(policy: Policy, layout: Layout, expected: torch.Tensor) -> str:
    """The energies of every kind of parameter and in total; the worst relative error."""
    dtype = torch.float32 if layout.distopt else torch.float64  # the distributed optimizer takes no fp64
    trainer = build(dataclasses.replace(policy, dtype=dtype), layout)
    energies = ExactEnergies(trainer.model, trainer.groups, policy.config, torch.device("cpu"))
    packing = trainer.step.settings.packing
    measure(energies, trajectories(), packing=packing, vocab_size=VOCAB, chunk=layout.logit_chunk)
    errors = worst_errors(energies.by_kind, expected)
    assert max(errors.values()) < TOLERANCE[dtype], errors
    assert not any(p.main_grad.any() for chunk in trainer.model for p in chunk.parameters()), "gradients were touched"
    return f"{max(errors.values()):.0e}"


def check_variant(name: str, sequence_parallel: bool, expected: torch.Tensor) -> None:
    """Kinds of parameters that the layouts' policies have not, on two tensor-parallel ranks."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    model = variant_model(name, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    energies = ExactEnergies([model], groups, _CONFIG, torch.device("cpu"))
    packing = PackingSettings(budget=60, alignment=RowAlignment(token_multiple=2 if sequence_parallel else 1))
    measure(energies, trajectories(), packing=packing, vocab_size=VOCAB)
    errors = worst_errors(energies.by_kind, expected)
    assert max(errors.values()) < TOLERANCE[torch.float64], (name, sequence_parallel, errors)


def main() -> None:
    reference = torch.load(sys.argv[1])
    with worker():
        for layout, names in LAYOUTS[dist.get_world_size()]:
            for name in names:
                with check(f"{name} with {layout}") as words:
                    words.append(check_energies(POLICIES[name], layout, reference["energies"][name]))
        for name, sequence_parallel in VARIANTS_OF_TWO if dist.get_world_size() == 2 else ():
            with check(f"{name}, sequence parallel: {sequence_parallel}"):
                check_variant(name, sequence_parallel, reference["variants"][name])
        for layout, names in STEP_LAYOUTS[dist.get_world_size()]:
            for name in names:
                with check(f"steps of {name} with {layout}"):
                    compare(run(STEPS[name], layout), reference["steps"][name])


if __name__ == "__main__":
    main()
