"""The cost of a step with each method for exact energies, against a step with group means and one trajectory at a time.

All on the same trajectories, interleaved; median CPU time, and peak memory beyond what the model itself holds.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import megatron_vcpo
from benchmarks.step_overhead import make_trajectories, vcpo_step
from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.forward import packed_seq_params, token_statistics
from megatron_vcpo.mcore.logprobs import OutputContext
from megatron_vcpo.mcore.packing import MicroBatch, RowAlignment, build_micro_batch
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import Size, TinyGPT, build_tiny_gpt

MINIBATCH = {"baseline_scope": "minibatch", "reward_normalization": "minibatch-std"}
WAYS = {
    "group mean": {"baseline": "mean"},
    "opob, logit energies": {},
    "opob, exact, two-pass": {"energy": "exact", "energy_method": "two-pass"},
    "opob, exact, deferred": {"energy": "exact", "energy_method": "deferred"},
    "opob, exact, accumulators": {"energy": "exact", "energy_method": "accumulators", **MINIBATCH},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The size of a step. If groups do not fit into a micro-batch, logit energies need a scoring pass."""

    name: str
    trajectories: int
    group: int
    prompt: int
    response: int
    longest_per_micro_batch: int  # token budget, in units of the longest trajectory


LOADS = (
    Load(name="short", trajectories=16, group=4, prompt=32, response=96, longest_per_micro_batch=8),
    Load(name="long", trajectories=4, group=2, prompt=256, response=1792, longest_per_micro_batch=2),
    Load(name="long-alone", trajectories=4, group=2, prompt=256, response=1792, longest_per_micro_batch=1),
)


def one_at_a_time(gpt: TinyGPT, trajectories: list[Trajectory], vocab: int) -> Callable[[], None]:
    """The method without packing: a micro-batch for each trajectory, and two more gradient buffers.

    Each backward gives one trajectory's gradient, whose squared norm is its energy. The buffers sum it weighted by the
    reward and by 1, and the minibatch's baseline combines them.
    """
    device = torch.device("cpu")
    micro_batches = [
        build_micro_batch(trajectories, (i,), alignment=RowAlignment(), device=device) for i in range(len(trajectories))
    ]
    context = OutputContext(vocab_size=vocab, temperature=1.0, chunk=0, tp_group=gpt.groups.tp)
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    scale = 1.0 / float(rewards.std(unbiased=False))

    def run() -> None:
        buffers = [buffer.grad_data for chunk in gpt.model for buffer in chunk.buffers]
        with_rewards = [torch.zeros_like(b) for b in buffers]
        with_ones = [torch.zeros_like(b) for b in buffers]
        energies = torch.zeros(len(trajectories), dtype=torch.float64)
        for i, micro in enumerate(micro_batches):
            for chunk in gpt.model:
                chunk.zero_grad_buffer()
            output = forward(gpt.model[0], micro, context)
            loss = _weighted_logprobs(output["logprobs"], micro) / len(trajectories)
            with gpt.model[0].no_sync():
                loss.backward()
            for buffer, p, s in zip(buffers, with_rewards, with_ones):
                energies[i] += torch.linalg.vecdot(buffer.view(-1, 64), buffer.view(-1, 64)).double().sum()
                p.add_(buffer, alpha=float(rewards[i]))
                s.add_(buffer)
        baseline = float((energies * rewards).sum() / energies.sum())
        for buffer, p, s in zip(buffers, with_rewards, with_ones):
            torch.add(p, s, alpha=-baseline, out=buffer)
            buffer.mul_(-scale)
        gpt.optimizer.step()

    return run


def _weighted_logprobs(logprobs: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    mask = micro.response_mask
    log_weight = (logprobs.detach() - micro.behavior_logprobs)[mask].double().sum()
    return log_weight.exp().clamp(max=8.0).float() * (logprobs * mask).sum() / mask.sum()


def forward(model: Any, micro: MicroBatch, context: OutputContext) -> Any:
    """Token statistics of one micro-batch."""
    return token_statistics(model, micro, packed_seq_params(micro), context)


def peak_memory(run: Callable[[], None]) -> float:
    """MiB by which resident memory rises while `run` runs."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1])


def compare(load: Load, size: Size, repeats: int) -> None:
    """Print the table of one load."""
    trajectories = make_trajectories(load.trajectories, load.group, size.vocab, load.prompt, load.response)
    budget = load.longest_per_micro_batch * (load.prompt + load.response * 3 // 2)
    with single_process_megatron() as groups:
        gpt = build_tiny_gpt(groups, size=size, lr=1e-5, sequence=budget)
        plain_step = gpt.optimizer.step
        runs: dict[str, Callable[[], None]] = {}
        for name, settings in WAYS.items():
            gpt.config.finalize_model_grads_func, gpt.optimizer.step = None, plain_step
            vcpo = megatron_vcpo.register(
                VCPOConfig(**settings),
                model=gpt.model,
                optimizer=gpt.optimizer,
                scheduler=gpt.scheduler,
                groups=groups,
                vocab_size=size.vocab,
                sequence_length=budget,
                max_response_length=2 * load.response,
            )
            runs[name] = vcpo_step(vcpo, gpt, trajectories, budget)
        single = one_at_a_time(gpt, trajectories, size.vocab)
        runs["one trajectory at a time, two buffers"] = partial(_with_plain_step, gpt, plain_step, single)
        parameters = sum(p.numel() for p in gpt.model[0].parameters()) / 1e6
        tokens = sum(t.num_tokens for t in trajectories)
        print(f"{load.name}: {load.trajectories} trajectories, {tokens} tokens, {parameters:.0f}M parameters")
        report(runs, repeats)


def _with_plain_step(gpt: TinyGPT, plain_step: Any, run: Callable[[], None]) -> None:
    gpt.optimizer.step = plain_step
    run()


def report(runs: dict[str, Callable[[], None]], repeats: int) -> None:
    """Run everything in turn; print median CPU times, their ratios to the first, and peak memory."""
    memory = {}
    for name, run in runs.items():
        run()
        memory[name] = peak_memory(run)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    base = seconds[next(iter(runs))]
    print(f"{'way':<40} {'CPU s':>8} {'ratio':>7} {'peak MiB':>9}  median of {repeats} interleaved runs")
    for name, values in seconds.items():
        ratio = statistics.median(v / b for v, b in zip(values, base))
        print(f"{name:<40} {statistics.median(values):>8.2f} {ratio:>7.3f} {memory[name]:>9.0f}", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load", choices=[load.name for load in LOADS], help="only this one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = options.hidden // 64
    size = Size(
        layers=options.layers,
        hidden=options.hidden,
        heads=heads,
        query_groups=heads,
        ffn=3 * options.hidden,
        vocab=options.vocab,
    )
    for load in LOADS:
        if options.load in (None, load.name):
            compare(load, size, options.repeats)


if __name__ == "__main__":
    main()
