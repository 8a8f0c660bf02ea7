"""One VCPO optimizer step against a plain Megatron-Core step on the same packed tokens, interleaved, CPU time.

The plain step is next-token cross-entropy on the same micro-batches: forward, backward, finalization of gradients,
optimizer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.packing import MicroBatch
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import Size, TinyGPT, build_tiny_gpt, optimizer_step

DEFAULTS = {
    "layers": 4,
    "hidden": 384,
    "vocab": 16384,
    "trajectories": 16,
    "group": 8,
    "prompt": 32,
    "response": 96,
    "repeats": 9,
}


def make_trajectories(count: int, group: int, vocab: int, prompt: int, response: int) -> list[Trajectory]:
    """Random tokens, responses of 50% to 150% of `response`."""
    rng = np.random.default_rng(0)
    out = []
    for i in range(count):
        length = int(rng.integers(response // 2, response + response // 2))
        out.append(
            Trajectory(
                prompt_ids=rng.integers(0, vocab, prompt).astype(np.int32),
                response_ids=rng.integers(0, vocab, length).astype(np.int32),
                behavior_logprobs=(-np.log(vocab) + 0.02 * rng.standard_normal(length)).astype(np.float32),
                versions=np.zeros(length, np.int32),
                response_mask=np.ones(length, bool),
                reward=float(rng.integers(0, 2)),
                group_id=i // group,
                index=i % group,
            )
        )
    return out


def plain_forward(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Megatron's own loss on the same micro-batch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    micro = next(data_iterator)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro.cu_seqlens,
        cu_seqlens_kv=micro.cu_seqlens,
        max_seqlen_q=micro.max_seqlen,
        max_seqlen_kv=micro.max_seqlen,
    )
    losses = model(micro.tokens, micro.position_ids, None, labels=micro.labels, packed_seq_params=packed)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        mask = micro.response_mask.float()
        total = (output.float().view(-1) * mask).sum()
        return total, mask.sum().int(), {"lm loss": torch.stack([total.detach().clone(), mask.sum()])}

    return losses, loss


def main() -> None:
    """Print the table."""
    import megatron_vcpo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sequence = (options.prompt + 2 * options.response) * options.group
    with single_process_megatron() as groups:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        heads = options.hidden // 64
        size = Size(
            layers=options.layers,
            hidden=options.hidden,
            heads=heads,
            query_groups=heads,
            ffn=3 * options.hidden,
            vocab=options.vocab,
        )
        gpt = build_tiny_gpt(groups, size=size, lr=1e-5, sequence=sequence)
        trajectories = make_trajectories(
            options.trajectories, options.group, options.vocab, options.prompt, options.response
        )
        gpt.config.finalize_model_grads_func = None
        plain_step = gpt.optimizer.step
        ways = {
            "vcpo, opob with logit energy": VCPOConfig(),
            "vcpo, group mean": VCPOConfig(baseline="mean"),
            "vcpo, opob over the minibatch (scoring pass)": VCPOConfig(baseline_scope="minibatch"),
        }
        steps: dict[str, Callable[[], None]] = {}
        for name, config in ways.items():
            gpt.config.finalize_model_grads_func, gpt.optimizer.step = None, plain_step
            vcpo = megatron_vcpo.register(
                config,
                model=gpt.model,
                optimizer=gpt.optimizer,
                scheduler=gpt.scheduler,
                groups=groups,
                vocab_size=options.vocab,
                sequence_length=sequence,
                max_response_length=2 * options.response,
            )
            steps[name] = vcpo_step(vcpo, gpt, trajectories, sequence)
        vcpo.begin(trajectories, model=gpt.model, forward_backward=get_forward_backward_func())
        batches = list(vcpo.data_iterator())

        def plain() -> None:
            gpt.config.finalize_model_grads_func, gpt.optimizer.step = finalize_model_grads, plain_step
            optimizer_step(gpt.model, gpt.optimizer, plain_forward, batches, sequence)

        measure({"plain Megatron-Core step": plain, **steps}, options.repeats)
        rows = sum(batch.tokens.size(1) for batch in batches)
        parameters = sum(p.numel() for p in gpt.model[0].parameters()) / 1e6
        print(f"{rows} rows in {len(batches)} micro-batches, {parameters:.0f}M parameters")


def vcpo_step(vcpo: Any, gpt: TinyGPT, trajectories: list[Trajectory], sequence: int) -> Callable[[], None]:
    """A complete step: packing, forward, backward, reductions, update."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    hooks = gpt.config.finalize_model_grads_func, gpt.optimizer.step

    def run() -> None:
        gpt.config.finalize_model_grads_func, gpt.optimizer.step = hooks
        vcpo.begin(trajectories, model=gpt.model, forward_backward=get_forward_backward_func())
        batches = list(vcpo.data_iterator())
        success, grad_norm, _ = optimizer_step(gpt.model, gpt.optimizer, vcpo.forward_step, batches, sequence)
        gpt.scheduler.step(len(trajectories))
        vcpo.end(success=success, grad_norm=grad_norm)

    return run


def measure(ways: dict[str, Callable[[], None]], repeats: int) -> None:
    """Run the functions in turn; print CPU seconds and ratios to the first."""
    for run in ways.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    base = seconds[next(iter(ways))]
    print(f"{'way':<48} {'CPU s (median)':>15} {'ratio':>7}  of {repeats} interleaved runs")
    for name, values in seconds.items():
        ratio = statistics.median(v / b for v, b in zip(values, base))
        print(f"{name:<48} {statistics.median(values):>15.3f} {ratio:>7.3f}")


if __name__ == "__main__":
    main()
