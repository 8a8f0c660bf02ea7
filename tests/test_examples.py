"""The launch scripts: they parse, and the cluster ones pass the dry run for the real model's sizes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_vcpo.checkpoint.hf_config import megatron_flags_for
from tests.oracle.forked import forked_python
from tests.oracle.model_folders import (
    DEEPSEEK_V3,
    LLAMA3_8B,
    QWEN3_30B_A3B,
    QWEN25_7B,
    write_model_folder,
    write_questions,
)

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*/*.sh"))
CLUSTER: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        "config": LLAMA3_8B,
        "trajectories": "64 (8 prompts x 8 responses)",
        "phase": "13 (832 trajectories)",
        "lag": "12 steps",
        "lengths": "2048 + 2048 tokens",
        "parameters": "8,030,261,248",
        "tp": 2,
    },
    "qwen2.5_7b_math": {
        "config": QWEN25_7B,
        "trajectories": "512 (32 prompts x 16 responses)",
        "phase": "11 (5,632 trajectories)",
        "lag": "10 steps",
        "lengths": "1024 + 2048 tokens",
        "parameters": "7,615,616,512",
        "tp": 4,
    },
}
MOE: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b": {
        "config": QWEN3_30B_A3B,
        "trajectories": "512 (32 prompts x 16 responses)",
        "parameters": "30,532,122,624",
        "layers with experts": "48 of 48",
        "ranks": "Rank map (16 processes, 4 engines of 4 ranks)",
        # 2,560 trajectories of 5,120 tokens: an id and 48 x 8 experts each, and 9 bytes a token of the response
        "waiting": 2560 * (5120 * (4 + 48 * 8) + 4096 * 9),
        "tp": 4,
        "gib": 80,
    },
    "deepseek_v3": {
        "config": DEEPSEEK_V3,
        "trajectories": "1024 (64 prompts x 16 responses)",
        "parameters": "671,026,419,200",
        "layers with experts": "58 of 61",
        "ranks": "Rank map (512 processes, 16 engines of 32 ranks)",
        "waiting": 5120 * (5120 * (4 + 58 * 8) + 4096 * 9),
        "tp": 4,
        "gib": 131,  # 141 GB
    },
}
ALL_CLUSTER = CLUSTER | MOE


def script_of(name: str, examples: Path = EXAMPLES) -> Path:
    return examples / ("moe" if name in MOE else "llama") / f"{name}.sh"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_executable_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK), f"chmod +x {script}"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"$@"' in script.read_text()


def test_what_the_scripts_share_only_defines_functions() -> None:
    """It is sourced: not executable, and with no effect of its own that a script's reader would have to look for."""
    common = EXAMPLES / "common.sh"
    assert not os.access(common, os.X_OK)
    # What bash has set before and after, but for the functions and what the last command leaves in `$_`.
    names = "compgen -v | grep -vx -e _ -e PIPESTATUS; set +o"
    shell = f'set -euo pipefail; before=; after=; before=$({names}); . "$1"; after=$({names}); [ "$before" = "$after" ]'
    done = subprocess.run(["bash", "-c", shell, "bash", str(common)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_that_lies_elsewhere_says_which_file_it_lacks(script: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mine" / "scripts" / script.name
    copy.parent.mkdir(parents=True)
    shutil.copy(script, copy)
    done = subprocess.run(["bash", str(copy)], capture_output=True, text=True, cwd=tmp_path)
    common = tmp_path / "examples" / "common.sh"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{common} is missing: set ROOT in {copy} to the megatron_vcpo checkout.\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [copy]


@pytest.mark.parametrize("name", ["llama/demo.sh", "moe/tiny_moe_cpu.sh"])
def test_a_demo_leaves_an_existing_run_alone(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    done = subprocess.run(
        ["bash", str(EXAMPLES / name), "1", str(run)],
        capture_output=True,
        text=True,
        env=os.environ | {"RUN_DIR": str(run)},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"{run} is there already; remove it, or choose another .*\.\n", done.stderr)
    assert not list(run.iterdir())


@pytest.mark.parametrize("code", [0, 3])
def test_a_demo_shows_the_plugins_lines_and_where_it_fails_the_end_of_the_log(code: int, tmp_path: Path) -> None:
    said = "noise\nmegatron_vcpo: ready\n  1/20 | reward 0.5\nreason\n"
    script = '. "$1"; run log sh -c \'printf "%s" "$0"; exit "$1"\' "$2" "$3"; echo after'
    command = ["bash", "-euo", "pipefail", "-c", script, "bash", str(EXAMPLES / "common.sh"), said, str(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    shown = "megatron_vcpo: ready\n  1/20 | reward 0.5\n"
    if code == 0:
        assert (done.returncode, done.stdout, done.stderr) == (0, shown + "after\n", "")
    else:
        assert (done.returncode, done.stdout) == (1, shown)
        assert done.stderr == f"The run failed; the end of log:\n{said}"
    assert (tmp_path / "log").read_text() == said


def launch(name: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    model = write_model_folder(folder / "model", ALL_CLUSTER[name]["config"])
    questions = str(write_questions(folder / "questions.jsonl"))
    flags = [
        *("--vcpo-dry-run", "--vcpo-load-hf", str(model), "--rollout-tokenizer", str(model)),
        *("--rollout-prompts", questions, "--rollout-eval-prompts", questions, "--save", str(folder / "save")),
    ]
    # A checkout whose python is this one, with its imports made; a torchrun that is called nevertheless fails.
    checkout = folder / "checkout"
    shutil.copytree(EXAMPLES, checkout / "examples")
    write_command(checkout / ".venv" / "bin" / "python", f'exec {shlex.join(forked_python())} "$@"')
    scripts = {"torchrun": "echo torchrun was started >&2; exit 9"}
    return run_with(scripts, folder, name, *flags, *more, examples=checkout / "examples")


def write_command(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def run_with(
    scripts: dict[str, str],
    folder: Path,
    name: str,
    *flags: str,
    rendezvous: str = "localhost:29500",
    examples: Path = EXAMPLES,
) -> subprocess.CompletedProcess[str]:
    """Run a cluster script with these commands first on PATH; a rendezvous is written into a copy, as a user would."""
    tools = folder / "bin"
    tools.mkdir()
    for command, body in scripts.items():
        write_command(tools / command, body)
    script = script_of(name, examples)
    if rendezvous != "localhost:29500":
        text = script.read_text()
        edits = {
            "RENDEZVOUS=localhost:29500 ": f"RENDEZVOUS={rendezvous} ",
            'ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)': f"ROOT={shlex.quote(str(REPOSITORY))}",
        }
        for old, new in edits.items():
            assert old in text
            text = text.replace(old, new)
        script = folder / script.name
        script.write_text(text)
    return subprocess.run(
        ["bash", str(script), *flags],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=folder,
        env=os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)},
    )


@pytest.mark.parametrize("name", CLUSTER)
@pytest.mark.slow
def test_a_cluster_script_passes_the_dry_run_with_the_papers_settings(name: str, tmp_path: Path) -> None:
    done = launch(name, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    text, expected = done.stdout, CLUSTER[name]
    assert text.startswith("VCPO dry run: every flag was checked, nothing was started.\n")

    def value(row: str) -> str:
        found = re.search(rf"^  {re.escape(row)} +(.*)$", text, re.MULTILINE)
        assert found, row
        return found[1]

    assert value("parameters") == expected["parameters"]
    assert value("trajectories a step") == expected["trajectories"]
    assert value("steps fed by one rollout phase") == expected["phase"]
    assert value("age of the oldest token, at most").startswith(expected["lag"])
    assert value("prompt + response, at most") == expected["lengths"]
    assert value("learning rate") == "1e-06 (constant) x (rho / 1.0)^(1/2), rho from raw weights"
    assert value("trainer's data type") == "bfloat16"
    assert value("layers from") == "transformer_engine"
    paper = {
        "--vcpo-correction": "sequence-tis",
        "--vcpo-correction-upper": "8.0",
        "--vcpo-ess-scaling": "sqrt",
        "--vcpo-ess-weights": "raw",
        "--vcpo-baseline": "opob",
        "--vcpo-baseline-scope": "group",
        "--vcpo-reward-normalization": "group-std",
        "--vcpo-aggregation": "seq-mean-token-mean",
        "--vcpo-kl-coefficient": "0.0",
        "--vcpo-entropy-coefficient": "0.0",
        "--rollout-temperature": "1.0",
        "--rollout-top-p": "1.0",
        "--rollout-engine-tensor-parallel-size": "2",
        "--sync-interval": "1",
    }
    assert {flag: value(flag) for flag in paper} == paper
    tp = expected["tp"]
    assert "Rank map (8 processes, 4 engines of 2 ranks)" in text
    rows = [[int(cell) for cell in row.split()] for row in text.split("engine_tp\n")[1].splitlines()[:8]]
    assert rows == [[rank, rank % tp, 0, 0, rank // tp, 0, rank // 2, rank % 2] for rank in range(8)]
    total = float(value("together"))
    assert 20 < total < 70, "does not fit a GPU of 80 GB"
    assert not (tmp_path / "save").exists()


@pytest.mark.parametrize(("name", "precision"), [("qwen3_30b_a3b", "bfloat16"), ("deepseek_v3", "float16")])
@pytest.mark.slow
def test_a_script_for_experts_passes_the_dry_run(name: str, precision: str, tmp_path: Path) -> None:
    done = launch(name, tmp_path, *(["--fp16"] if precision == "float16" else []))
    assert done.returncode == 0, done.stderr[-2000:]
    text, expected = done.stdout, MOE[name]

    def value(row: str) -> str:
        found = re.search(rf"^  {re.escape(row)} +(.*)$", text, re.MULTILINE)
        assert found, row
        return found[1]

    for row in ("parameters", "layers with experts"):
        assert value(row) == expected[row]
    assert value("trajectories a step") == expected["trajectories"]
    assert value("age of the oldest token, at most").startswith("4 steps")
    assert value("trainer's data type") == precision
    assert value("--rollout-engine-dtype") == precision
    assert value("--rollout-router-replay") == "rollout"
    assert value("layers from") == "transformer_engine"
    assert expected["ranks"] in text
    assert f"up to {expected['waiting'] / (1 << 30):.1f} GiB of waiting trajectories in the host's memory" in text
    assert 0.4 * expected["gib"] < float(value("together")) < 0.9 * expected["gib"], "does not fit its GPUs"
    assert not (tmp_path / "save").exists()


@pytest.mark.slow
def test_a_flag_at_the_end_of_a_cluster_script_wins(tmp_path: Path) -> None:
    done = launch("llama3_8b", tmp_path, "--rollout-max-lag", "3", "--vcpo-dry-run-processes", "16")
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"age of the oldest token, at most +3 steps", done.stdout)
    assert "Rank map (16 processes, 8 engines of 2 ranks)" in done.stdout


@pytest.mark.slow
def test_a_mistake_in_a_cluster_script_ends_it_with_code_2_and_one_sentence(tmp_path: Path) -> None:
    done = launch("qwen2.5_7b_math", tmp_path, "--num-layers", "27")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "num_layers is 27, the checkpoint's 28" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ALL_CLUSTER)
def test_a_cluster_script_holds_every_flag_of_its_model(name: str, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", ALL_CLUSTER[name]["config"])
    words = script_of(name).read_text().replace('"([0]*3+[1]*58)"', f"[{','.join('0' * 3 + '1' * 58)}]").split()
    flags = megatron_flags_for(folder, tensor_model_parallel_size=ALL_CLUSTER[name]["tp"])
    implied = {
        "--attention-dropout",
        "--hidden-dropout",
        "--padded-vocab-size",
    }  # ours are 0, and what Megatron pads to
    for i, flag in enumerate(flags):
        if not flag.startswith("--") or flag in implied:
            continue
        assert flag in words, flag
        if i + 1 < len(flags) and not flags[i + 1].startswith("--"):
            given = words[words.index(flag) + 1]
            assert given == flags[i + 1] or float(given) == float(flags[i + 1]), flag


def test_a_cluster_script_starts_torchrun_without_the_dry_run(tmp_path: Path) -> None:
    done = run_with({"torchrun": 'printf "%s\\n" "$@"'}, tmp_path, "llama3_8b", "--seed", "5")
    words = done.stdout.splitlines()
    assert words[:4] == ["--nnodes", "1", "--nproc-per-node", "8"]
    assert words[words.index("-m") + 1] == "megatron_vcpo.train"
    assert words[-2:] == ["--seed", "5"]
    assert "--vcpo-dry-run-processes" not in words


def test_a_cluster_script_finds_the_torchrun_of_make_setup_where_none_is_on_the_path(tmp_path: Path) -> None:
    script = tmp_path / "examples" / "llama" / "llama3_8b.sh"
    script.parent.mkdir(parents=True)
    script.write_text(script_of("llama3_8b").read_text())
    shutil.copy(EXAMPLES / "common.sh", tmp_path / "examples")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "dirname").symlink_to(shutil.which("dirname") or "/usr/bin/dirname")
    run = partial(subprocess.run, [shutil.which("bash"), script], capture_output=True, text=True, cwd=tmp_path)
    without = run(env={"PATH": str(tmp_path / "path")})
    assert (without.returncode, without.stdout) == (127, "")
    assert "torchrun: command not found" in without.stderr
    torchrun = tmp_path / ".venv" / "bin" / "torchrun"
    torchrun.parent.mkdir(parents=True)
    torchrun.write_text('#!/bin/sh\necho "$0"\n')
    torchrun.chmod(0o755)
    assert run(env={"PATH": str(tmp_path / "path")}).stdout == f"{torchrun}\n"


@pytest.mark.parametrize("name", MOE)
def test_many_machines_do_not_meet_at_localhost(name: str, tmp_path: Path) -> None:
    done = run_with({"torchrun": "echo started"}, tmp_path, name)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"RENDEZVOUS in \S+ names localhost, .*: write one machine's host:port\.\n", done.stderr)


@pytest.mark.parametrize("name", ALL_CLUSTER)
def test_one_flag_turns_a_cluster_script_to_fp16_in_trainer_and_engine(name: str, tmp_path: Path) -> None:
    def words(folder: str, *flags: str) -> list[str]:
        (tmp_path / folder).mkdir()
        scripts = {"torchrun": 'printf "%s\\n" "$@"'}
        done = run_with(scripts, tmp_path / folder, name, *flags, rendezvous="node0:29500")
        return done.stdout.splitlines()

    usual, half = words("bf16"), words("fp16", "--fp16")
    assert ("--bf16" in usual, "--fp16" in usual) == (True, False)
    assert usual[usual.index("--rollout-engine-dtype") + 1] == "bfloat16"
    assert ("--bf16" in half, half.count("--fp16")) == (False, 1)
    assert half[half.index("--rollout-engine-dtype") + 1] == "float16"
    added = set(half) - set(usual)
    assert added == {"--fp16", "float16", "--initial-loss-scale", "65536"}
