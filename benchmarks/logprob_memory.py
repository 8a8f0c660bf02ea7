"""Log-probs, logit energies and entropies of packed tokens against a naive version: seconds and peak memory.

Naive is an fp32 log_softmax over all logits, differentiated by autograd. Ours keeps the logits in the model's dtype and
converts one block of rows at a time to fp32; with --vcpo-logit-chunk the logits themselves exist only for a chunk. Each
row is a forward and backward pass from hidden states, including the output layer; memory is the peak beyond hidden
states, weight and their gradients. Interleaved, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_vcpo.mcore.logprobs import OutputContext, output_processor

_ENTROPY_COEFFICIENT = 0.001


def naive(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """A loss of log-probs and entropies, with energies, from logits that all exist in fp32 at once."""
    logits = (hidden @ weight.T).float() / temperature
    log_pi = torch.log_softmax(logits, 1)
    pi = log_pi.exp()
    logprobs = log_pi.gather(1, labels[:, None])[:, 0]
    with torch.no_grad():
        energy = 1.0 - 2.0 * logprobs.exp() + pi.square().sum(1)
    entropy = -(pi * log_pi).sum(1)
    assert energy.dim() == 1
    return logprobs.sum() + _ENTROPY_COEFFICIENT * entropy.sum()


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int) -> Tensor:
    """The same loss, through the hook that GPTModel.forward calls."""

    def output_layer(rows: Tensor, weight: Tensor, runtime_gather_output: bool) -> tuple[Tensor, None]:
        return rows @ weight.T, None

    out: dict[str, Tensor] = output_processor(
        hidden_states=hidden.unsqueeze(1),
        output_layer=output_layer,
        output_weight=weight,
        labels=labels[None],
        context=OutputContext(vocab_size=weight.size(0), temperature=temperature, chunk=chunk, tp_group=None),
        config=SimpleNamespace(sequence_parallel=False, tensor_model_parallel_size=1),
    )
    return out["logprobs"].sum() + _ENTROPY_COEFFICIENT * out["entropy"].sum()


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak memory of `run` beyond what was held before; on the CPU, of the resident set."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def measure(options: argparse.Namespace) -> None:
    """Print the table."""
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = (0.05 * torch.randn(options.vocab, options.hidden, generator=generator)).to(device, dtype).requires_grad_()
    labels = torch.randint(0, options.vocab, (options.tokens,), generator=generator).to(device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    ways: dict[str, Callable[[], Tensor]] = {
        "naive, fp32 log_softmax": lambda: naive(hidden, weight, labels, options.temperature),
        "ours": lambda: ours(hidden, weight, labels, options.temperature, 0),
        f"ours, --vcpo-logit-chunk {options.chunk}": lambda: ours(
            hidden, weight, labels, options.temperature, options.chunk
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, list[int]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 1):
        for name, way in ways.items():

            def run(way: Callable[[], Any] = way) -> None:
                way().backward()

            started = time.perf_counter()
            peak = peak_bytes(run, device)
            if repeat > 0:
                seconds[name].append(time.perf_counter() - started)
                peaks[name].append(peak)
    print(f"{options.tokens} tokens, vocabulary {options.vocab}, hidden {options.hidden}, {options.dtype}, {device}")
    print(f"{'way':<32} {'s':>7} {'ratio':>6} {'peak MiB':>9} {'ratio':>6}")
    base = next(iter(ways))
    for name in ways:
        ratio = statistics.median(mine / plain for mine, plain in zip(seconds[name], seconds[base]))
        peak, plain_peak = statistics.median(peaks[name]), statistics.median(peaks[base])
        print(
            f"{name:<32} {statistics.median(seconds[name]):>7.2f} {ratio:>6.2f} {peak / 2**20:>9.0f} "
            f"{peak / plain_peak:>6.2f}"
        )


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measure(options)


if __name__ == "__main__":
    main()
