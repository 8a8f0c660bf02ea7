"""Does a long run leak resources? Watch many steps of the smallest model, with saves and evaluations.

It watches resident memory, open files and threads of the trainer and all its children, and the bytes in shared memory.
It prints the values at a tenth, at half and at the end of the run, and the slope per step over the second half, when
caches and pools should have reached their final size. --placement process watches an engine in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import psutil

from examples.char_tokenizer import write_char_tokenizer
from megatron_vcpo.observability.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
FLAGS = [
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "1", "--ffn-hidden-size", "64"),
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--seq-length", "32", "--lr", "1e-4", "--lr-decay-style", "constant"),
    *("--rollout-environment", "sort_digits", "--rollout-max-response-length", "4", "--rollout-max-lag", "3"),
    *("--rollout-environment-config", '{"n_digits": 3, "prompt_template": "{digits}:"}'),
    *("--rollout-prompts-per-step", "2", "--rollout-responses-per-prompt", "2"),
    *("--rollout-engine-kv-cache-bytes", str(1 << 26), "--rollout-eval-num-prompts", "4"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The resources of a process and its children at one moment."""

    memory: float  # MB resident; pages shared between processes count for each of them
    files: float  # open descriptors
    threads: float
    shared: float  # MB in /dev/shm

    @staticmethod
    def of(process: psutil.Process) -> Holdings:
        """The current values; a child that ends meanwhile does not count."""
        memory = files = threads = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                memory += one.memory_info().rss
                files += one.num_fds()
                threads += one.num_threads()
            except psutil.NoSuchProcess:
                continue
        shared = sum(entry.stat().st_blocks * 512 for entry in os.scandir("/dev/shm") if entry.is_file())
        return Holdings(memory=memory / 2**20, files=files, threads=threads, shared=shared / 2**20)


def watch(steps: int, placement: str, folder: Path) -> list[tuple[int, Holdings]]:
    """Run, and check once a second: (steps logged so far, resources held)."""
    write_char_tokenizer(folder / "tokenizer")
    command = [
        *(sys.executable, "-W", "ignore", "-m", "megatron_vcpo.train", *FLAGS, "--rollout-quiet"),
        *("--rollout-tokenizer", str(folder / "tokenizer"), "--train-iters", str(steps)),
        *("--rollout-engine-placement", placement, "--rollout-run-dir", str(folder / "run")),
        *("--save", str(folder / "checkpoints"), "--save-interval", str(max(1, steps // 20))),
        *("--save-retain-interval", str(steps), "--rollout-eval-interval", str(max(1, steps // 20))),
    ]
    seen: list[tuple[int, Holdings]] = []
    with (folder / "output").open("w") as output:
        run = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=subprocess.STDOUT
        )
        process = psutil.Process(run.pid)
        while run.poll() is None:
            metrics = folder / "run" / "metrics.jsonl"
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            # After the last step is logged the run releases everything, so there are no more samples.
            if 1 < lines <= steps and (not seen or lines - 1 > seen[-1][0]):
                try:
                    seen.append((lines - 1, Holdings.of(process)))
                except psutil.NoSuchProcess:
                    break
            time.sleep(1.0)
        if run.wait() != 0:
            sys.exit(f"The run failed with code {run.returncode}:\n{(folder / 'output').read_text()[-3000:]}")
    last = read_metrics(folder / "run")[-1]["iteration"]
    if last != steps:
        sys.exit(f"The run ended after {last} of {steps} steps.")
    return seen


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default: 1000)")
    parser.add_argument("--placement", default="colocated", help="of the engine (default: colocated)")
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        seen = watch(args.steps, args.placement, Path(folder))
    seconds = time.monotonic() - started
    at = np.array([step for step, _ in seen], dtype=np.float64)
    second_half = at >= args.steps / 2
    print(f"{args.steps} steps, engine {args.placement}, {len(seen)} samples, {seconds / 60:.1f} min")
    print(f"{'':<22}{'at 10 %':>10}{'at 50 %':>10}{'at the end':>12}{'slope per step':>18}")
    units = {
        "memory": "resident memory, MB",
        "files": "descriptors",
        "threads": "threads",
        "shared": "shared memory, MB",
    }
    for field in fields(Holdings):
        values = np.array([getattr(holdings, field.name) for _, holdings in seen])
        tenth, half = (values[np.abs(at - share * args.steps).argmin()] for share in (0.1, 0.5))
        slope = np.polyfit(at[second_half], values[second_half], 1)[0]
        print(f"{units[field.name]:<22}{tenth:>10.1f}{half:>10.1f}{values[-1]:>12.1f}{slope:>18.5f}")


if __name__ == "__main__":
    main()
