"""Whole runs of the supervised warm-up that start in a folder which is in use, is finished, or has lost its tracker."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from examples.char_tokenizer import write_char_tokenizer
from megatron_vcpo.checkpoint.torch_dist import TRACKER
from megatron_vcpo.launch.folder_lock import LOCK_FILE, FolderLock
from megatron_vcpo.observability.metrics import read_metrics
from tests.oracle.forked import forked_python

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
FLAGS = [
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--ffn-hidden-size", "64"),
    *("--seq-length", "32", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--lr", "4e-3", "--lr-decay-style", "constant", "--rollout-quiet"),
    *("--rollout-max-response-length", "8", "--rollout-prompts-per-step", "4", "--rollout-responses-per-prompt", "1"),
    *("--train-iters", "3", "--save-interval", "2"),  # the last save is pretrain()'s own, after the loop
]
KILLER = "tests.oracle.faulty_answers:KillsCheckpointManager"


def launch(folder: Path, *flags: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    tokenizer = ("--rollout-tokenizer", str(folder / "tokenizer"))
    return subprocess.run(
        [*forked_python(), "-W", "ignore", *start, "-m", "megatron_vcpo.supervised", *FLAGS, *tokenizer, *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Inode and digest of every file but the lock."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file() and path.name != LOCK_FILE
    }


def test_a_folder_is_made_worse_by_no_start(tmp_path: Path) -> None:
    write_char_tokenizer(tmp_path / "tokenizer")
    run = tmp_path / "run"
    save, load = ("--save", str(run), "--rollout-environment", KILLER), ("--load", str(run))

    done = launch(tmp_path, *save)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "megatron_vcpo: note: the process that collects what a checkpoint's writers wrote was ended" in done.stderr
    assert (run / TRACKER).read_text() == "3"
    before = contents(run)

    done = launch(tmp_path, *save, *load)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "megatron_vcpo: nothing is left to train" in done.stderr
    assert contents(run) == before

    lock = FolderLock(run, "--save")
    done = launch(tmp_path, *save, *load, "--train-iters", "4", processes=2)
    lock.close()
    assert done.returncode != 0
    in_use = f"megatron_vcpo: --save {run} is in use by another run (process {os.getpid()} on "
    assert done.stderr.count(in_use) == 1, done.stderr[-4000:]
    assert "ConfigError" not in done.stderr  # torchrun's own trace is the only one
    assert contents(run) == before

    (run / TRACKER).unlink()

    old = read_metrics(run)
    done = launch(tmp_path, *save, *load, "--ckpt-step", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert (run / TRACKER).read_text() == "3"
    after = contents(run)
    for name, entry in before.items():
        if name.startswith("iter_0000003/"):
            assert after[f"replaced_{name.replace('/', '.1/', 1)}"] == entry
    (run / "metrics.cut.1.jsonl").rename(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path) == old[2:]
    again = read_metrics(run)
    assert again[:2] == old[:2]
    assert again[2]["loss"] == old[2]["loss"]
