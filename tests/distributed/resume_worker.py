"""Run under torchrun, two processes: optimizers, schedulers and weights through Megatron's dist_checkpointing.

Both kinds of save, and damage between save and load. What goes on after a load is the run that never stopped, to the
bit in the same layout and nearly so in another one.
"""

# ruff: noqa: E402 - torch has to be patched before Megatron is imported

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vcpo.patches import megatron_cpu

megatron_cpu.install()

import torch
import torch.distributed as dist

from megatron_vcpo.checkpoint import guard
from megatron_vcpo.checkpoint.checksums import MANIFEST
from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.optim import EssSettings
from megatron_vcpo.patches import checkpoint_unpickling, save_before_first_update
from tests.oracle.layouts import Layout, Policy, Trainer, build, trajectories
from tests.oracle.worker import check, worker

RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
BUCKETS = {"distrib_optim_sharding_type": "dp_reshardable"}


def make(layout: Layout, dtype: torch.dtype = torch.float32, seed: int = 0) -> Trainer:
    config = VCPOConfig(tokens_per_micro_batch=60, kl_coefficient=0.1)
    half = {"hysteresis": 1, "initial_loss_scale": 64.0} if dtype == torch.float16 else {}
    trainer = build(Policy(moe=layout.ep > 1, config=config, dtype=dtype, optimizer=half), layout)
    trainer.scheduler.ess = EssSettings(reference=None)
    generator = torch.Generator().manual_seed(seed)
    if seed:  # what is loaded must not be there already; the KL reference was copied before
        with torch.no_grad():
            for chunk in trainer.model:
                for parameter in chunk.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        trainer.optimizer.reload_model_params()
    return trainer


def bare(trainer: Trainer) -> Any:
    from megatron.core.utils import unwrap_model

    (chunk,) = unwrap_model(trainer.model)
    return chunk


def sharded(trainer: Trainer, metadata: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    content = {
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": trainer.groups.dp_cp,
        **(metadata if trainer.layout.distopt else {}),
    }
    weights = bare(trainer).sharded_state_dict(metadata=content)
    optimizer = trainer.optimizer.sharded_state_dict(weights, loading, metadata=content)
    return {"model": weights, "optimizer": optimizer, "scheduler": trainer.scheduler.state_dict()}


def save(trainer: Trainer, metadata: dict[str, Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    state = sharded(trainer, metadata, loading=False)
    if trainer.layout.ep == 1:
        dist_checkpointing.save(state, str(folder))
        return
    request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")
    assert not (folder / MANIFEST).exists()
    request.execute_sync()


def load(trainer: Trainer, metadata: dict[str, Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(sharded(trainer, metadata, loading=True), str(folder))
    bare(trainer).load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.load_state_dict(state["scheduler"])


def check_damage(folder: Path) -> None:
    """A byte that rank 1 wrote, changed afterwards, stops both ranks by the file's name."""
    from megatron.core import dist_checkpointing

    file = max(folder.glob("__1_*.distcp"), default=None)
    if file is None:  # with one replica of everything, rank 0 may write it all
        file = max(folder.glob("__0_*.distcp"))
    assert str(file.name) in json.loads((folder / MANIFEST).read_text())["files"]
    dist_checkpointing.load_common_state_dict(str(folder))
    data = file.read_bytes()
    said = []
    for content in (data[:-1] + bytes([data[-1] ^ 1]), data):
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(content)
        dist.barrier()
        try:
            dist_checkpointing.load_common_state_dict(str(folder))
        except CheckpointError as error:
            said.append(str(error))
    assert len(said) == 1, said
    assert f"{file.name} is damaged: its checksum is" in said[0]


def states(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    return [state for part in trainer.optimizer.chained_optimizers for state in part.optimizer.state.values()]


def overflow(trainer: Trainer) -> None:
    """A step that overflows on rank 1 alone, which halves the loss scale and moves nothing else."""
    loss = trainer.step.loss

    def spoilt(inputs: Any) -> Any:
        outputs = loss(inputs)
        return dataclasses.replace(outputs, loss=outputs.loss * (1e30 if dist.get_rank() == 1 else 1.0))

    trainer.step.loss = spoilt
    assert trainer.train(trajectories(9))["skipped"] == 1.0
    trainer.step.loss = loss


def check_resume(
    folder: Path, layout: Layout, other: Layout, dtype: torch.dtype, metadata: dict[str, Any], faulty: bool
) -> None:
    """Two steps, a save, two steps; the second half again after a load into `other`."""
    whole = make(layout, dtype)
    for seed in range(2):
        whole.train(trajectories(seed), lag=seed)
    if faulty:
        overflow(whole)
    save(whole, metadata, folder)
    check_damage(folder)
    expected = [whole.train(trajectories(seed), lag=seed) for seed in (2, 3)]
    weights = whole.weights()

    resumed = make(other, dtype, seed=1)
    load(resumed, metadata, folder)
    steps = [state["step"] for state in states(resumed)]
    assert len({step.data_ptr() for step in steps}) == len(steps)
    assert {float(step) for step in steps} == {2.0}
    found = [resumed.train(trajectories(seed), lag=seed) for seed in (2, 3)]
    assert {float(state["step"]) for state in states(resumed)} == {4.0}
    near = 0.0 if layout == other else 1.0
    for ours, theirs in zip(found, expected, strict=True):
        for key in ("rho", "lr", "grad_norm", "pg_loss", "kl"):
            close = math.isclose(ours[key], theirs[key], rel_tol=2e-4 * near, abs_tol=1e-6 * near)
            assert close, (key, ours[key], theirs[key])
    tolerance = {"rtol": 1e-4 * near, "atol": 1e-5 * near}
    for name, tensor in resumed.weights().items():
        torch.testing.assert_close(tensor, weights[name], **tolerance, msg=lambda text, n=name: f"{n}: {text}")


def checks(folder: Path) -> list[tuple[str, Callable[[], None]]]:
    fp32, fp16 = torch.float32, torch.float16
    plain, distributed = Layout(), Layout(distopt=True)
    experts, both = Layout(ep=2), Layout(ep=2, distopt=True)
    combinations: list[tuple[Layout, Layout, torch.dtype, dict[str, Any], bool]] = [
        (plain, plain, fp16, {}, True),
        (distributed, distributed, fp32, BUCKETS, False),
        (distributed, distributed, fp16, RESHARDABLE, True),
        (distributed, Layout(tp=2, distopt=True), fp32, RESHARDABLE, False),
        (experts, experts, fp32, {}, False),
        (both, both, fp32, BUCKETS, False),
        (both, both, fp16, RESHARDABLE, True),
    ]
    found: list[tuple[str, Callable[[], None]]] = []
    for number, (layout, other, dtype, metadata, faulty) in enumerate(combinations):
        run = partial(check_resume, folder / str(number), layout, other, dtype, metadata, faulty)
        found.append((f"{layout} -> {other}, {dtype}, {metadata.get('distrib_optim_sharding_type')}", run))
    return found


def main() -> None:
    with worker():
        save_before_first_update.apply()
        checkpoint_unpickling.apply()
        guard.install(verify=True, rollout_state=True)
        for name, run in checks(Path(sys.argv[1])):
            with check(name):
                run()


if __name__ == "__main__":
    main()
