"""Run under torchrun, two processes: half precision, forced overflows and bad data, on both optimizers.

A fault strikes one rank only; all ranks must skip, and go on as if the step had never been.
"""

# ruff: noqa: E402 - torch has to be patched before Megatron is imported

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_vcpo.patches import megatron_cpu

megatron_cpu.install()

import numpy as np
import torch
import torch.distributed as dist

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.logprobs import VocabShard, token_statistics
from megatron_vcpo.mcore.reductions import RankDisagreement
from megatron_vcpo.objective import LossInputs, LossOutputs
from megatron_vcpo.optim import EssSettings
from tests.oracle.layouts import Layout, Policy, Trainer, build, trajectories
from tests.oracle.worker import check, worker

PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "fp16 dynamic": (torch.float16, {"hysteresis": 1, "initial_loss_scale": 64.0}),
    "fp16 constant": (torch.float16, {"loss_scale": 64.0}),
}
LAYOUTS = [Layout(), Layout(distopt=True), Layout(ep=2), Layout(ep=2, distopt=True)]


class Faults:
    """Wraps a trainer's loss: notes the types that reach it, and spoils it on demand on one rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.factor = 1.0
        self.dtypes: set[torch.dtype] = set()
        self._loss = trainer.step.loss
        trainer.step.loss = self

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        for field in dataclasses.fields(inputs):
            value = getattr(inputs, field.name)
            if torch.is_tensor(value) and value.is_floating_point():
                self.dtypes.add(value.dtype)
        outputs = self._loss(inputs)
        self.dtypes.add(outputs.loss.dtype)
        return dataclasses.replace(outputs, loss=outputs.loss * self.factor)


def make(precision: str, layout: Layout) -> tuple[Trainer, Faults]:
    dtype, optimizer = PRECISIONS[precision]
    config = VCPOConfig(tokens_per_micro_batch=60)
    trainer = build(Policy(moe=layout.ep > 1, config=config, dtype=dtype, optimizer=optimizer), layout)
    trainer.scheduler.ess = EssSettings(reference=None)  # so that the scheduler has a state to be spoilt
    return trainer, Faults(trainer)


def parts(trainer: Trainer) -> list[Any]:
    return trainer.optimizer.chained_optimizers


def state(trainer: Trainer) -> dict[str, Any]:
    """All that a step may change, but for the loss scale, copied."""
    found: dict[str, Any] = {"scheduler": trainer.scheduler.state_dict()}
    for c, chunk in enumerate(trainer.model):
        found |= {f"{c}.{name}": p.detach().clone() for name, p in chunk.named_parameters()}
    for i, part in enumerate(parts(trainer)):
        for j, group in enumerate(part.optimizer.param_groups):
            found[f"lr {i} {j}"] = (group["lr"], group.get("step"), group["weight_decay"])
            for k, parameter in enumerate(group["params"]):
                found[f"main {i} {j} {k}"] = parameter.detach().clone()
                for name, value in part.optimizer.state.get(parameter, {}).items():
                    found[f"{name} {i} {j} {k}"] = value.clone() if torch.is_tensor(value) else value
    return found


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if torch.is_tensor(first):
        return first.dtype == second.dtype and torch.equal(first, second)
    return bool(first == second)


def agreed(trainer: Trainer, batch: list[Trajectory]) -> dict[str, float]:
    """The metrics of a step, which all ranks must share to the bit."""
    metrics = trainer.train(batch)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, {name: repr(value) for name, value in metrics.items()})
    assert all(row == rows[0] for row in rows), rows
    return metrics


def scales(trainer: Trainer) -> list[float]:
    return [float(part.get_loss_scale()) for part in parts(trainer)]


def must_skip(trainer: Trainer, batch: list[Trajectory]) -> dict[str, float]:
    before = state(trainer)
    metrics = agreed(trainer, batch)
    assert metrics["skipped"] == 1.0
    after = state(trainer)
    changed = [name for name in before if not same(before[name], after[name])]
    assert before.keys() == after.keys()
    assert not changed, changed
    return metrics


def check_spoilt_loss(precision: str, layout: Layout) -> None:
    """Overflow and NaN on rank 1 alone: the run goes on like one that never met them."""
    fp16 = precision.startswith("fp16")
    runs = []
    for faulty in (False, True):
        trainer, faults = make(precision, layout)
        first = agreed(trainer, trajectories(0))
        assert first["skipped"] == 0.0
        assert 0.0 < first["rho"] < 1.0
        assert faults.dtypes <= {torch.float32, torch.float64}, faults.dtypes
        for factor in (1e30, math.nan) if faulty else ():
            if factor == 1e30 and not fp16:
                continue  # their range holds it
            faults.factor = factor if dist.get_rank() == 1 else 1.0
            before = scales(trainer)
            must_skip(trainer, trajectories(1))
            judged_by_scaler = precision == "fp16 dynamic"
            assert scales(trainer) == [scale / 2 if judged_by_scaler else scale for scale in before]
        faults.factor = 1.0
        last = agreed(trainer, trajectories(2))
        assert last["skipped"] == 0.0
        runs.append((last, state(trainer)))
    (plain, expected), (faulty_run, found) = runs
    if precision == "fp16 dynamic":  # another scale rounds some small gradients differently
        assert abs(faulty_run["grad_norm"] / plain["grad_norm"] - 1.0) < 2e-3
        assert faulty_run["rho"] == plain["rho"]
    else:
        assert [name for name in expected if not same(expected[name], found[name])] == []
        assert plain == faulty_run


def check_overflow_of_experts(precision: str, layout: Layout) -> None:
    """Gradients of one rank's experts alone overflow: no parameter of any kind moves, and all scales fall alike."""
    norms = []
    for faulty in (False, True):
        trainer, _ = make(precision, layout)
        agreed(trainer, trajectories(0))
        config = trainer.model[0].config
        finalize = config.finalize_model_grads_func
        if faulty:
            config.finalize_model_grads_func = lambda *a, f=finalize, t=trainer, **k: (f(*a, **k), _spoil_expert(t))
            before = scales(trainer)
            must_skip(trainer, trajectories(1))
            assert scales(trainer) == [scale / 2 for scale in before]
            config.finalize_model_grads_func = finalize
        norms.append(agreed(trainer, trajectories(2))["grad_norm"])
    assert abs(norms[1] / norms[0] - 1.0) < 2e-3, norms


def _spoil_expert(trainer: Trainer) -> None:
    if dist.get_rank() == 1:
        expert = next(p for p in trainer.model[0].parameters() if not getattr(p, "allreduce", True))
        expert.main_grad.fill_(math.inf)


def check_spoilt_weights(precision: str, layout: Layout) -> None:
    """A NaN in the weights of rank 1 alone."""
    trainer, _ = make(precision, layout)
    agreed(trainer, trajectories(0))
    weight = next(trainer.model[0].parameters())
    clean = weight.detach().clone()
    if dist.get_rank() == 1:
        with torch.no_grad():
            weight.fill_(math.nan)
    metrics = agreed(trainer, trajectories(1))
    assert metrics["skipped"] == 1.0
    assert 0.0 < metrics["nonfinite_trajectories"] < 1.0
    with torch.no_grad():
        weight.copy_(clean)
    assert agreed(trainer, trajectories(1))["skipped"] == 0.0


def without_tokens(trajectory: Trajectory, *, masked: bool) -> Trajectory:
    if masked:
        return dataclasses.replace(trajectory, response_mask=np.zeros(len(trajectory.response_ids), bool))
    return dataclasses.replace(
        trajectory,
        response_ids=np.zeros(0, np.int32),
        behavior_logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        response_mask=np.zeros(0, bool),
    )


def check_thin_minibatches(precision: str, layout: Layout) -> None:
    """Micro-batches, groups and whole minibatches from which much was lost."""
    trainer, faults = make(precision, layout)
    batch = trajectories(0)
    empty = [without_tokens(t, masked=t.index % 2 == 0) for t in batch]
    taken: dict[str, list[Trajectory]] = {
        # more than one micro-batch of them on each rank
        "one trajectory with tokens": [*batch[:1], *empty[1:], *empty[1:]],
        "a group lost all members": [t for t in batch if t.group_id != 1],
        "a group lost all but one": [t for t in batch if t.group_id != 1 or t.index == 0],
        "fewer trajectories than ranks": batch[:1],
    }
    for name, chosen in taken.items():
        metrics = agreed(trainer, chosen)
        assert metrics["skipped"] == 0.0, name
        assert all(math.isfinite(metrics[key]) for key in ("rho", "pg_loss", "lr", "grad_norm")), name
    for name, chosen in {"everything was rejected": [], "nothing was sampled": empty}.items():
        must_skip(trainer, chosen)
        assert trainer.step.skip_reason, name
    assert agreed(trainer, trajectories(2))["skipped"] == 0.0
    assert faults.dtypes <= {torch.float32, torch.float64}


def check_ranks_that_disagree() -> None:
    """A learning rate that differs between ranks ends the run on all of them, before any parameter moves."""
    trainer, _ = make("fp32", Layout())
    agreed(trainer, trajectories(0))
    before = state(trainer)
    apply = trainer.scheduler.apply
    trainer.scheduler.apply = lambda *args: apply(*args) * (1.0 - 2.0**-52 * dist.get_rank())
    try:
        trainer.train(trajectories(1))
    except RankDisagreement as error:
        assert "The learning-rate multiplier differs between ranks" in str(error)  # noqa: PT017 - not a pytest test
    else:
        raise AssertionError("ranks went on with two learning rates")
    after = state(trainer)
    assert all(same(before[name], after[name]) for name in before if not name.startswith("lr "))


def check_vocab_parallel_statistics() -> None:
    """Half a vocabulary on each rank against autograd over the whole in fp64."""
    rank, vocab, rows, width = dist.get_rank(), 61, 9, 32
    for dtype, tolerance in (
        (torch.float64, 1e-11),
        (torch.float32, 2e-6),
        (torch.bfloat16, 4e-3),
        (torch.float16, 5e-4),
    ):
        for temperature in (1.0, 0.7):
            generator = torch.Generator().manual_seed(3)
            logits = (4.0 * torch.randn(rows, 2 * width, dtype=torch.float64, generator=generator)).to(dtype)
            targets = torch.randint(0, vocab, (rows,), generator=generator)
            weights = torch.randn(2, rows, dtype=torch.float64, generator=generator)
            mine = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
            stats = token_statistics(
                mine, targets, VocabShard.of(width, vocab, dist.group.WORLD), temperature=temperature
            )
            (weights[0] * stats.logprobs + weights[1] * stats.entropy).sum().backward()
            whole = logits.double().requires_grad_()
            log_pi = torch.log_softmax(whole[:, :vocab] / temperature, 1)
            pi = log_pi.exp()
            logprobs = log_pi.gather(1, targets[:, None])[:, 0]
            entropy = -(pi * log_pi).sum(1)
            onehot = torch.nn.functional.one_hot(targets, vocab)
            (weights[0] * logprobs + weights[1] * entropy).sum().backward()
            exact = 1e-11 if dtype == torch.float64 else 5e-6  # of the values: fp32 whatever the logits are
            for ours, theirs in (
                (stats.logprobs, logprobs),
                (stats.energy, ((onehot - pi) ** 2).sum(1)),
                (stats.entropy, entropy),
            ):
                assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                torch.testing.assert_close(ours.double(), theirs, rtol=exact, atol=exact)
            expected = whole.grad[:, rank * width : (rank + 1) * width]
            torch.testing.assert_close(mine.grad.double(), expected, rtol=tolerance, atol=tolerance)


def checks() -> list[tuple[str, Callable[[], None]]]:
    """Every precision on every layout for what matters most, and the rest on one layout for each precision."""
    combinations: list[tuple[Callable[[str, Layout], None], str, Layout]] = [
        (check_spoilt_loss, precision, layout)
        for layout in LAYOUTS
        for precision in PRECISIONS
        if precision != "fp32" or layout == Layout()
    ]
    for precision, layout in zip(PRECISIONS, LAYOUTS, strict=True):
        combinations += [(check_spoilt_weights, precision, layout), (check_thin_minibatches, precision, layout)]
    combinations += [(check_overflow_of_experts, "fp16 dynamic", layout) for layout in LAYOUTS if layout.ep > 1]
    found: list[tuple[str, Callable[[], None]]] = [
        ("check_vocab_parallel_statistics", check_vocab_parallel_statistics),
        ("check_ranks_that_disagree", check_ranks_that_disagree),
    ]
    combinations.sort(key=lambda each: each[2].ep)  # changing the groups takes a second
    for checked, precision, layout in combinations:
        found.append((f"{checked.__name__}, {precision}, {layout}", partial(checked, precision, layout)))
    return found


def main() -> None:
    with worker():
        for name, run in checks():
            with check(name):
                run()


if __name__ == "__main__":
    main()
