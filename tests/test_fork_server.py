"""A fork of the server is what a new process is: what the tests that use it rest on."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from examples.char_tokenizer import write_char_tokenizer
from megatron_vcpo.observability.metrics import read_metrics
from tests.oracle.forked import forked_python

ROOT = Path(__file__).parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
PYTHONS = {"a new process": None, "a fork": False, "a fork with vLLM": True}
# pytest's own, what torchrun chooses anew each time, and what only its own wrapper of a program reads.
FREE = {
    "PYTEST_CURRENT_TEST",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}


def run(vllm: bool | None, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`vllm`: of the fork server; None: a new process."""
    head = [sys.executable] if vllm is None else forked_python(vllm=vllm)
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 900} | options
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | options.pop("env", {})
    return subprocess.run([*head, *words], env=variables, **options)


@functools.cache
def fingerprints(vllm: bool | None, processes: int) -> list[dict[str, Any]]:
    """Of a program by itself (0 processes), or of torchrun's ranks, in order."""
    launcher = (*TORCHRUN, str(processes)) if processes else ("-W", "ignore")
    done = run(vllm, *launcher, "-m", "tests.oracle.fingerprint", "one", "--two=3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("at exit\n") == max(processes, 1)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for one in found:
        one["environment"] = {k: v for k, v in one["environment"].items() if k not in FREE}
    return sorted(found, key=lambda one: one["environment"].get("RANK", ""))


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Name -> (found, expected) of what should be equal and is not, of the environment each variable."""
    both = [{**one, **{f"${name}": value for name, value in one["environment"].items()}} for one in (found, expected)]
    names = (both[0].keys() | both[1].keys()) - {"environment", "random"}
    pairs = {name: tuple(one.get(name) for one in both) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.slow
def test_a_fork_finds_what_a_new_process_finds(vllm: bool, processes: int) -> None:
    (expected,), (found,) = fingerprints(None, processes), fingerprints(vllm, processes)
    assert differences(found, expected) == {}
    assert not set(found["random"]) & set(expected["random"])  # nobody seeds any


@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.slow
def test_every_rank_has_its_number_and_random_generators_of_its_own(vllm: bool) -> None:
    ranks = fingerprints(vllm, 3)
    assert [one["environment"]["LOCAL_RANK"] for one in ranks] == ["0", "1", "2"]
    assert {one["environment"]["WORLD_SIZE"] for one in ranks} == {"3"}
    for kind in range(len(ranks[0]["random"])):
        assert len({str(one["random"][kind]) for one in ranks}) == 3


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(3)", (3, "", "")),
        ("import sys; sys.exit('a sentence')", (1, "", "a sentence\n")),
        ("import sys; print(sys.stdin.read(), sys.argv)", (0, "words ['-c', 'x', '-y']\n", "")),
        ("import os; print('lost'); os._exit(4)", (4, "", "")),
        ("import os; os.kill(os.getpid(), 9)", (-9, "", "")),
        ("import os; os.abort()", (-6, "", "")),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
         (0, "late\n", "")),
        ("import os, multiprocessing as m; q = m.SimpleQueue(); m.Process(target=q.put, args=(5,)).start(); "
         "print(q.get())", (0, "5\n", "")),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_program_ends_as_it_would(python: str, code: str, expected: tuple[int, str, str]) -> None:
    done = run(PYTHONS[python], "-c", code, "x", "-y", input="words", env={"PYTHONUNBUFFERED": ""})
    assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.slow
def test_what_a_program_raises_is_a_trace_and_code_1(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def fail(): raise RuntimeError('it broke')\n")
    (tmp_path / "program.py").write_text("import beside\nif __name__ == '__main__':\n    beside.fail()\n")
    done = run(False, "program.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("RuntimeError: it broke\n")


@pytest.mark.slow
def test_the_first_rank_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(5)\ntime.sleep(3000)\n")
    done = run(False, *TORCHRUN, "2", str(program))
    assert done.returncode == 1
    assert done.stderr == "rank 1 failed: exitcode  : 5 (it ends the others)\n"


@pytest.mark.parametrize("launcher", [(), (*TORCHRUN, "2")], ids=["alone", "torchrun"])
@pytest.mark.slow
def test_a_program_ends_with_the_process_that_stands_for_it(launcher: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(3000)\n")
    stand_in = subprocess.Popen([*forked_python(), *launcher, str(program)], stdout=subprocess.PIPE, text=True)
    assert stand_in.stdout is not None
    processes = [int(stand_in.stdout.readline()) for _ in range(2 if launcher else 1)]
    stand_in.kill()
    assert stand_in.stdout.read() == ""  # to the end: whoever could write there is gone
    assert stand_in.wait() == -signal.SIGKILL
    until = time.monotonic() + 60.0
    while any(Path(f"/proc/{process}").exists() for process in processes) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


@pytest.mark.slow
def test_words_that_it_does_not_know_are_refused() -> None:
    for words in (
        ["-X", "dev", "-c", "pass"],
        ["-W", "error", "-c", "pass"],
        ["-m", TORCHRUN[1], "--nnodes", "2", "x"],
    ):
        done = run(False, *words)
        assert done.returncode == 70
        assert "the fork server could not run" in done.stderr


@pytest.mark.distributed
def test_a_run_computes_the_same_to_the_bit_as_a_new_process_and_under_torchrun(tmp_path: Path) -> None:
    write_char_tokenizer(tmp_path / "tokenizer")
    flags = (
        *("-m", "megatron_vcpo.supervised", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
        *("--ffn-hidden-size", "64", "--seq-length", "32", "--swiglu", "--normalization", "RMSNorm", "--lr", "4e-3"),
        *("--lr-decay-style", "constant", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
        *("--rollout-environment", "sort_digits", "--rollout-max-response-length", "8", "--rollout-quiet"),
        *("--rollout-prompts-per-step", "4", "--rollout-responses-per-prompt", "1", "--train-iters", "3"),
        *("--rollout-tokenizer", str(tmp_path / "tokenizer"), "--tensor-model-parallel-size", "2"),
    )
    found = {}
    for name, vllm in PYTHONS.items():
        done = run(vllm, *TORCHRUN, "2", *flags, "--rollout-run-dir", str(tmp_path / name))
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = [
            {k: v for k, v in record.items() if not k.startswith("time/") and v == v}
            for record in read_metrics(tmp_path / name)
        ]
    assert len(found["a fork"]) == 3
    assert found["a new process"] == found["a fork"] == found["a fork with vLLM"]
