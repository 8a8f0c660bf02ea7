"""Faults in whole runs, nearly all of the supervised warm-up, which needs no engine: overflow, a process that hangs or
dies, a resume of what is damaged."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.char_tokenizer import write_char_tokenizer
from megatron_vcpo.observability.metrics import read_metrics
from megatron_vcpo.runtime.watchdog import EXIT_CODE
from tests.oracle.forked import forked_python

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
FLAGS = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--ffn-hidden-size", "128"),
    *("--seq-length", "32", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--lr", "4e-3", "--lr-decay-style", "constant", "--rollout-quiet"),
    *("--rollout-max-response-length", "8", "--rollout-prompts-per-step", "16", "--rollout-responses-per-prompt", "1"),
]
FP16 = ["--fp16", "--initial-loss-scale", str(2**96), "--vcpo-overflow-retries", "20"]
OVERFLOWS = 3  # of loss scales 2**96, 2**64, 2**32 and 1


def launch(
    folder: Path,
    *flags: str,
    processes: int = 1,
    program: Sequence[str] = ("megatron_vcpo.supervised",),
    forked: bool = True,
) -> subprocess.CompletedProcess[str]:
    if not (folder / "tokenizer").exists():
        write_char_tokenizer(folder / "tokenizer")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    module = ["-m", *program, *FLAGS, "--rollout-tokenizer", str(folder / "tokenizer")]
    python = forked_python(vllm="megatron_vcpo.train" in program) if forked else [sys.executable]
    return subprocess.run(
        [*python, "-W", "ignore", *start, *module, *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def train(folder: Path, name: str, iterations: int, *flags: str) -> list[dict[str, float]]:
    saving = ("--save", str(folder / name), "--save-interval", "2", "--train-iters", str(iterations))
    task = ("--rollout-environment", "sort_digits", "--rollout-environment-config", '{"n_digits": 3}')
    steep = ("tests.oracle.steep_loss_scale", "32", "megatron_vcpo.supervised")
    done = launch(folder, *task, *FP16, *saving, *flags, program=steep)
    assert done.returncode == 0, done.stderr[-4000:]
    return read_metrics(folder / name)


def test_overflowed_steps_are_tried_again_and_a_resume_between_two_tries_changes_nothing(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", 6)
    # The checkpoint of iteration 2 lies between a try and the next.
    assert [record["skipped"] for record in whole] == [1.0] * OVERFLOWS + [0.0] * (6 - OVERFLOWS)
    # One minibatch all along, the same loss under the same weights, and no learning rate or version moved.
    tries = whole[: OVERFLOWS + 1]
    assert len({record["loss"] for record in tries}) == 1
    assert [record["version"] for record in whole] == [0] * OVERFLOWS + list(range(1, 7 - OVERFLOWS))
    assert [record["count/retried_steps"] for record in tries] == [*range(1, OVERFLOWS + 1), OVERFLOWS]
    assert whole[-1]["count/skipped_steps"] == OVERFLOWS
    assert len({record["lr"] for record in whole}) == 1
    assert whole[OVERFLOWS + 1]["loss"] != tries[0]["loss"]
    train(tmp_path, "halves", 2)
    halves = train(tmp_path, "halves", 6, "--load", str(tmp_path / "halves"))
    timeless = [
        [{k: v for k, v in r.items() if not k.startswith("time/") and k != "train_iters" and v == v} for r in run]
        for run in (whole, halves)
    ]
    assert timeless[0] == timeless[1]


def test_a_step_is_made_again_without_a_trajectory_that_is_not_finite_under_the_policy(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        *("--rollout-environment", "tests.oracle.faulty_answers:SpoilingAnswers", "--train-iters", "4"),
        *("--rollout-run-dir", str(tmp_path / "run"), "--vcpo-tokens-per-micro-batch", "64"),
        processes=2,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "iteration 3 is made again without 1 of 16 trajectories" in done.stderr
    records = read_metrics(tmp_path / "run")
    assert [record["skipped"] for record in records] == [0.0] * 4
    assert [record.get("count/repeated_steps", 0.0) for record in records] == [0.0, 0.0, 1.0, 1.0]
    assert [record.get("count/nonfinite_trajectories", 0.0) for record in records] == [0.0, 0.0, 1.0, 1.0]
    assert all(record["grad_norm"] > 0.0 for record in records)


@pytest.mark.engine
def test_rollouts_of_an_overflowed_step_come_again_and_weights_are_published_every_second_step(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        *("--rollout-environment", "sort_digits", "--rollout-environment-config", '{"n_digits": 3}'),
        *("--fp16", "--initial-loss-scale", str(2**100), "--train-iters", "6"),
        *("--rollout-prompts-per-step", "4", "--rollout-responses-per-prompt", "4"),
        *("--sync-interval", "2", "--rollout-max-lag", "1", "--rollout-engine-kv-cache-bytes", str(1 << 26)),
        # A response that knows nothing earns nothing; entropy has a gradient all the same.
        *("--vcpo-entropy-coefficient", "0.01", "--vcpo-ess-reference", "auto", "--rollout-save-trajectories", "1000"),
        *("--rollout-run-dir", str(tmp_path / "run")),
        program=("tests.oracle.steep_loss_scale", "100", "megatron_vcpo.train"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = read_metrics(tmp_path / "run")
    assert [record["skipped"] for record in steps] == [1, 0, 0, 0, 0, 0]
    assert [record["version"] for record in steps] == [0, 1, 2, 3, 4, 5]
    assert [record["lag_max"] for record in steps] == [0, 0, 1, 0, 1, 0]
    # The second step trains on what the first could not, and nothing was sampled or published for it.
    assert ["time/generate" in record for record in steps] == [True, False, True, True, True, True]
    assert ["time/sync" in record for record in steps] == [True, False, False, True, False, True]
    assert steps[0]["loss"] == steps[1]["loss"]
    assert steps[-1]["count/retried_steps"] == 1
    # Of the steps before the last that were made, those two were fresh.
    assert steps[-1]["rho_reference"] == pytest.approx((steps[1]["rho"] + steps[3]["rho"]) / 2, rel=1e-12)
    assert len({record["rho"] for record in steps[1:5]}) == 4
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [sample["version"] for sample in samples] == [version for version in (0, 0, 2, 2, 4) for _ in range(16)]
    assert [sample["group"] for sample in samples] == [index // 4 for index in range(5 * 16)]


def test_a_rank_that_hangs_ends_the_run_within_the_deadline_by_name_and_phase(tmp_path: Path) -> None:
    started = time.monotonic()
    done = launch(
        tmp_path,
        *("--rollout-environment", "tests.oracle.faulty_answers:SleepyAnswers", "--train-iters", "5"),
        *("--vcpo-phase-deadline", "5"),
        processes=2,
        forked=False,  # torchrun itself has to end with it
    )
    assert done.returncode != 0
    assert time.monotonic() - started < 800.0  # the rank sleeps for longer, and the machine may be busy
    assert re.search(
        r"megatron_vcpo: rank 0 waited \d+ s in phase 'reduce gradients and statistics' of iteration 3 \(at .*\) for "
        r"rank 1 in phase 'take a minibatch' of iteration 3 at prompt \(oracle/faulty_answers.py:\d+\)",
        done.stderr,
    ), done.stderr[-4000:]
    assert re.search(rf"exitcode\s*: {EXIT_CODE} ", done.stderr)


def test_a_rank_that_is_killed_is_named_at_once_with_its_phase_and_without_a_trace(tmp_path: Path) -> None:
    """Without torchrun, which ends the others too, perhaps before they have said why."""
    write_char_tokenizer(tmp_path / "tokenizer")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    task = ("--rollout-environment", "tests.oracle.faulty_answers:DeadlyAnswers", "--train-iters", "5")
    folders = ("--rollout-tokenizer", str(tmp_path / "tokenizer"), "--rollout-run-dir", str(tmp_path / "run"))
    ranks = [
        subprocess.Popen(
            [*forked_python(), "-W", "ignore", "-m", "megatron_vcpo.supervised", *FLAGS, *task, *folders],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=900)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [EXIT_CODE, -signal.SIGKILL], said[0][-4000:]
    assert re.search(
        r"megatron_vcpo: rank 0 failed in phase '[\w ]+' of iteration 4, since a process that it waited for is gone: "
        r"rank 1 has ended, last seen in phase 'take a minibatch' of iteration 4 at \w+ \(.*:\d+\) \(\w+: .*\)\n",
        said[0],
    ), said[0][-4000:]
    assert "Traceback" not in said[0], said[0][-4000:]


def test_what_cannot_be_resumed_is_one_sentence_and_what_has_ended_says_so(tmp_path: Path) -> None:
    saved = tmp_path / "run"
    train(tmp_path, "run", 2)
    task = ("--rollout-environment", "sort_digits", "--rollout-environment-config", '{"n_digits": 3}', *FP16)
    resume = (*task, "--load", str(saved), "--rollout-run-dir", str(saved))

    done = launch(tmp_path, *resume, "--train-iters", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"megatron_vcpo: nothing is left to train: the checkpoint in --load {saved} is of iteration 2" in done.stderr

    done = launch(tmp_path, *resume, "--train-iters", "3", "--hidden-size", "128")
    assert done.returncode == 1
    assert re.search(
        rf"megatron_vcpo: the checkpoint \(--load {saved}\) could not be loaded: CheckpointingException: Global shape "
        r"mismatch .* Either the flags are of another model",
        done.stderr,
    ), done.stderr[-4000:]
    assert "Traceback" not in done.stderr.split("megatron_vcpo: the checkpoint")[-1]

    with (saved / "metrics.jsonl").open("r+") as file:
        file.write("?")
    done = launch(tmp_path, *resume, "--train-iters", "3", processes=2)
    assert done.returncode != 0
    sentence = re.escape(f"{saved / 'metrics.jsonl'} line 1 is not a metrics record")
    assert re.search(rf"megatron_vcpo: {sentence}", done.stderr), done.stderr[-4000:]
    assert re.search(rf"megatron_vcpo: \[rank 1\] Rank 0 failed: {sentence}", done.stderr), done.stderr[-4000:]
    assert "MetricsFileError" not in done.stderr

    tensors = saved / "iter_0000002" / "__0_0.distcp"
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)
    done = launch(tmp_path, *resume, "--train-iters", "3")
    assert done.returncode == 1
    assert f"megatron_vcpo: {tensors} is damaged: its checksum is " in done.stderr, done.stderr[-4000:]

    metadata = saved / "iter_0000002" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:200])
    done = launch(tmp_path, *resume, "--train-iters", "3")
    assert done.returncode == 2
    assert f"megatron_vcpo: --load: {metadata} has 200 bytes of " in done.stderr, done.stderr[-4000:]
