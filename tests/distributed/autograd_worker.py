"""Run under torchrun: one step of every case in every layout of this job, against autograd in fp64."""

# ruff: noqa: E402 - torch has to be patched before Megatron is imported

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_vcpo.patches import megatron_cpu

megatron_cpu.install()

import torch
import torch.distributed as dist

from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore import forward
from megatron_vcpo.mcore.reference import ReferencePolicy
from tests.oracle.autograd_step import Step, adam_change
from tests.oracle.layouts import Layout, Policy, Trainer, build
from tests.oracle.plain_gpt import PlainGPT
from tests.oracle.step_cases import (
    ADAM_EPSILON,
    CASES,
    POLICY_MARK,
    SPOILT_POLICY,
    Case,
    frozen_weight,
    model_of,
    policy_weight,
)
from tests.oracle.worker import check, worker

# Relative, of fp32 against fp64; errors are in units of it. Measured over all layouts and cases: 0.4 for log-weights
# (sums of up to 28 log-probs), 0.5 for losses (relative to the sum of their absolute terms), 0.8 for gradients.
TOLERANCE = 1e-5
LARGEST_REWARD = 1.0  # differences of rewards, and so baselines, are no more precise than these

DENSE, MOE = False, True
LAYOUTS: dict[str, tuple[tuple[Layout, tuple[bool, ...]], ...]] = {
    "one process": ((Layout(), (DENSE, MOE)),),
    "tensor parallel": ((Layout(tp=2), (DENSE,)),),
    "sequence parallel": ((Layout(tp=2, sp=True), (MOE,)),),
    "pipeline parallel": ((Layout(pp=2), (DENSE, MOE)),),
    "expert parallel": ((Layout(ep=2), (MOE,)),),
    "context parallel": ((Layout(cp=2), (DENSE, MOE)),),
    "data parallel": ((Layout(), (DENSE, MOE)), (Layout(distopt=True), (MOE, DENSE))),
    "all at once": ((Layout(tp=2, sp=True, pp=2, ep=2, etp=1), (MOE,)),),
}


@dataclass
class Found:
    """What a step was; [N] are the trajectories that took part."""

    metrics: dict[str, float] = field(default_factory=dict)
    has_loss: bool = False
    loss: float = math.nan
    # [N], None where the step needs them in no more than one place
    baselines: torch.Tensor | None = None
    log_weights: torch.Tensor | None = None
    energies: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # by Hugging Face names, as the next two
    clipped: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Reduced gradients of the whole model by their Hugging Face names; not with the distributed optimizer, which
    leaves each rank a part of them."""
    parameters = [p for chunk in trainer.model for p in chunk.parameters()]
    values = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad
    found = {name: tensor.clone() for name, tensor in trainer.gatherer.stream()}
    for p, value in zip(parameters, values):
        p.data = value
    return found


@contextmanager
def spoilt_outputs(case: Case) -> Iterator[None]:
    """Let the trainer's own numbers of POLICY_MARK be not finite, as the case says."""
    kinds = set(case.spoilt.values())
    original = forward.output_processor

    def spoil(*, labels: torch.Tensor, **arguments: Any) -> dict[str, torch.Tensor]:
        output = original(labels=labels, **arguments)
        marked = labels.view(-1) == POLICY_MARK
        for kind, value in SPOILT_POLICY.items():
            if kind in kinds:
                output["logprobs"] = output["logprobs"].masked_fill(marked, value)
        if "entropy" in kinds:
            output["entropy"] = output["entropy"].masked_fill(marked, math.nan)
        return output

    forward.output_processor = spoil  # type: ignore[assignment]
    try:
        yield
    finally:
        forward.output_processor = original


def run(case: Case, trajectories: list[Trajectory], layout: Layout, *, moe: bool) -> Found:
    """One step of the product."""
    model, found = model_of(case, moe=moe), Found()
    optimizer = {"clip_grad": case.clip}
    trainer = build(Policy(config=case.config, moe=moe, tied=case.tied, optimizer=optimizer), layout)
    if trainer.step.reference is not None:
        trainer.set_weights(frozen_weight(model, spoilt="reference" in case.spoilt.values()))
        trainer.step.reference = ReferencePolicy(trainer.model)
    trainer.set_weights(policy_weight(model))
    update, set_baselines = trainer.optimizer.step, trainer.step.set_baselines

    def record_measured(measured: Any) -> None:
        found.log_weights, found.energies = measured.log_weights, measured.energies
        set_baselines(measured)

    def record_gradients() -> Any:
        found.baselines = trainer.step.minibatch.baselines
        found.gradients = {} if layout.distopt else gradients(trainer)
        result = update()
        found.clipped = {} if layout.distopt else gradients(trainer)
        return result

    trainer.step.set_baselines, trainer.optimizer.step = record_measured, record_gradients
    with spoilt_outputs(case):
        found.metrics = trainer.train(trajectories)
    found.weights = trainer.weights()
    found.has_loss = bool(trainer.losses)
    found.loss = total_loss(trainer) if found.has_loss else math.nan
    return found


def total_loss(trainer: Trainer) -> float:
    """The minibatch's loss from what the schedule logged; on the last stage alone."""
    total = torch.stack([row["vcpo loss"][0].double() for row in trainer.losses]).sum()
    dist.all_reduce(total, group=trainer.groups.dp)
    return float(total)


def errors(found: Found, expected: Step, case: Case, model: PlainGPT) -> dict[str, float]:
    """Quantity -> error in units of its tolerance; NaN where one side is NaN."""
    out: dict[str, float] = {"skipped": math.inf if found.metrics["skipped"] != expected.skipped else 0.0}
    for name, value in expected.metrics.items():
        size = max(abs(value), {"pg_loss": expected.loss_size, "baseline": LARGEST_REWARD}.get(name, 1e-2))
        out[name] = abs(found.metrics.get(name, math.nan) - value) / (TOLERANCE * size)
    before = policy_weight(model)
    if expected.skipped:
        moved = [name for name, tensor in found.weights.items() if not torch.equal(tensor, before(name))]
        return out | {f"change of {name}": math.inf for name in moved}
    if found.has_loss:
        size = max(abs(expected.loss), expected.loss_size)
        out["total loss"] = abs(found.loss - expected.loss) / (TOLERANCE * size)
    for name, mine, theirs, least in (
        ("baselines", found.baselines, expected.baselines, LARGEST_REWARD),
        ("log-weights", found.log_weights, expected.log_weights, 3.0),
        ("energies", found.energies, expected.energies, 1e-2),
    ):
        if mine is not None:
            out[name] = _worst(mine, torch.tensor(theirs, dtype=torch.float64), least)
    clipped = expected.clipped(case.clip)
    for what, gradient, right in (
        ("gradient", found.gradients, expected.gradients),
        ("clipped gradient", found.clipped, clipped),
    ):
        norm = math.sqrt(sum(float(t.square().sum()) for t in right.values()))
        for name, tensor in gradient.items():
            # A parameter's own norm may be a small remainder of large terms.
            size = float(right[name].norm()) + 0.1 * norm
            out[f"{what} of {name}"] = float((tensor - right[name]).norm()) / (TOLERANCE * size)
    for name, tensor in found.weights.items():
        after = before(name).double() + adam_change(clipped[name], expected.metrics["lr"], ADAM_EPSILON)
        error = (tensor - after).abs().max()
        # Adam's slope is largest at a gradient of zero, which may be a remainder too.
        slope = expected.metrics["lr"] / ADAM_EPSILON
        out[f"change of {name}"] = float(error / (1e-6 + TOLERANCE * slope * clipped[name].abs().max()))
    return out


def _worst(mine: torch.Tensor, right: torch.Tensor, least: float) -> float:
    """Largest relative error over the usable trajectories."""
    assert mine.shape == right.shape, f"{len(mine)} trajectories in the place of the {len(right)} usable ones"
    return float(((mine - right).abs() / right.abs().clamp(min=least)).max()) / TOLERANCE


def check_layout(layout: Layout, kinds: tuple[bool, ...], reference: Any, only: str) -> tuple[list[str], str]:
    """What is wrong, a line for each case, and the largest errors that are not."""
    wrong: list[str] = []
    worst: dict[str, float] = {}
    alone = dist.get_world_size() == 1
    for number, case in enumerate(CASES):
        if only not in case.name or not (alone or case.everywhere):
            continue
        moe = kinds[(number + number // 4) % len(kinds)]  # four cases have one correction, each another energy
        trajectories, expected = reference[moe][case.name]
        model = model_of(case, moe=moe)
        try:
            found = errors(run(case, trajectories, layout, moe=moe), expected, case, model)
        except Exception as error:
            error.add_note(f"{case.name}, experts: {moe}")
            raise
        outside = {name: error for name, error in found.items() if not error <= 1.0}
        if outside:
            wrong.append(f"{case.name}, experts: {moe}: " + ", ".join(f"{n} {e:.1e}" for n, e in outside.items()))
        for name, error in found.items():
            kind = name.split(" of ")[0]
            worst[kind] = max(worst.get(kind, 0.0), error)
    return wrong, ", ".join(f"{name} {value:.2f}" for name, value in worst.items())


def main() -> None:
    """Arguments: file of the reference, name of the layouts and, to look into a failure, a part of a case's name."""
    reference = torch.load(sys.argv[1], weights_only=False, mmap=True)
    with worker():
        for layout, kinds in LAYOUTS[sys.argv[2]]:
            with check(f"all cases with {layout}") as words:
                wrong, worst = check_layout(layout, kinds, reference, "".join(sys.argv[3:]))
                words.append(worst)
                assert not wrong, "errors in units of their tolerance:\n" + "\n".join(wrong)


if __name__ == "__main__":
    main()
