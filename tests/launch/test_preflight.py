"""What is opened before a run starts, and the sentences about what cannot be opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_vcpo.config import ConfigError
from megatron_vcpo.launch import preflight
from tests.oracle.command_line import CommandLine
from tests.oracle.model_folders import LLAMA3_8B, write_questions

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = LLAMA3_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 120,
}


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(tmp_path, monkeypatch)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def jsonl(path: Path) -> list[str]:
    return ["--rollout-environment", "jsonl", "--rollout-prompts", str(path)]


# ---------------------------------------------------------------------- prompts and environments


def test_a_missing_prompt_file_is_named(command_line: CommandLine, tmp_path: Path) -> None:
    sentence = command_line.refusal(*jsonl(tmp_path / "gone.jsonl"))
    assert str(tmp_path / "gone.jsonl") in sentence
    assert "cannot be read" in sentence


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ("{not json", "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ('{"text": "1 + 1?"}', "'question', 'prompt', 'problem'"),
        ('{"question": "1 + 1?"}', "'answer', 'solution'"),
        ('{"question": "", "answer": "2"}', "not empty"),
    ],
)
def test_a_malformed_prompt_is_named_by_file_and_line(
    command_line: CommandLine, tmp_path: Path, line: str, fragment: str
) -> None:
    path = write_questions(tmp_path / "prompts.jsonl", 2)
    with path.open("a") as file:
        file.write(f"\n{line}\n")
    sentence = command_line.refusal(*jsonl(path))
    assert f"{path} line 4" in sentence
    assert fragment in sentence


def test_an_empty_prompt_file_is_refused(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "holds no questions" in command_line.refusal(*jsonl(tmp_path / "empty.jsonl"))


def test_the_held_out_file_is_checked_as_well(command_line: CommandLine, tmp_path: Path) -> None:
    flags = [*jsonl(write_questions(tmp_path / "prompts.jsonl")), "--rollout-eval-interval", "2"]
    assert "--rollout-eval-prompts" in command_line.refusal(*flags)
    assert "gone" in command_line.refusal(*flags, "--rollout-eval-prompts", str(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--rollout-environment", "jsonl"], "needs --rollout-prompts"),
        (["--rollout-prompts", "x.jsonl"], "is for --rollout-environment jsonl"),
        (["--rollout-environment", "sort_digit"], "There is no environment 'sort_digit'"),
        (["--rollout-environment", "no_such_module:Task"], "no_such_module"),
        (["--rollout-environment", "reasoning_gym:chain_sums"], "chain_sum"),
        (["--rollout-environment-config", "{"], "is not JSON"),
        (["--rollout-environment-config", "[]"], "must be a JSON object"),
        (["--rollout-environment-config", "[" * 100_000], "is not JSON (it is nested too deeply)"),
        (["--rollout-environment-config", '{"n_digits": 3, "n_digits": 4}'], "'n_digits' stands twice"),
        (["--rollout-environment-config", '{"stop": "\\ud800"}'], "text that is not Unicode"),
        (["--rollout-environment-config", '{"n_digits": NaN}'], "a number that is not finite"),
        (["--rollout-environment-config", '{"reasoning": "<think>"}'], "reasoning must be a list of pairs"),
        (["--rollout-environment-config", '{"n_digits": 0}'], "n_digits"),
        (["--rollout-environment-config", '{"digits": 3}'], "digits"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(
    command_line: CommandLine, flags: list[str], fragment: str
) -> None:
    assert fragment in command_line.refusal(*flags)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_environment_whose_first_prompt_no_tokenizer_takes_is_refused(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    (tmp_path / "odd_task.py").write_text(
        "from megatron_vcpo.environments import Prompt\n"
        "class Odd:\n"
        "    def __init__(self, *, split, seed): self.split = split\n"
        f"    def prompt(self, index): return Prompt(text='1\\ud800' if self.split == '{split}' else '1')\n"
        "    def reward(self, prompt, response): return 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_task", raising=False)
    sentence = command_line.refusal("--rollout-environment", "odd_task:Odd", "--rollout-eval-interval", "1")
    assert "prompt(0) of the environment Odd holds a lone surrogate" in sentence


def test_an_evaluation_without_tasks_is_refused_before_the_start(command_line: CommandLine) -> None:
    flags = ["--rollout-environment", "reasoning_gym:basic_arithmetic", "--rollout-environment-config"]
    sentence = command_line.refusal(*flags, '{"size": 1000000000000}')
    assert "size of reasoning_gym:basic_arithmetic must be a whole number from 1 to 10000000" in sentence


# ---------------------------------------------------------------------- loss


@pytest.mark.parametrize(
    ("path", "fragment"),
    [
        ("my_loss", "import path 'module:function'"),
        ("no_such_module:loss", "cannot import 'no_such_module'"),
        (".relative:loss", "import path 'module:function'"),
        ("megatron_vcpo.objective:no_loss", "has no function 'no_loss'"),
    ],
)
def test_a_loss_or_advantages_that_cannot_be_found_are_refused(
    command_line: CommandLine, path: str, fragment: str
) -> None:
    sentence = command_line.refusal("--vcpo-loss", path)
    assert "--vcpo-loss" in sentence
    assert fragment in sentence
    none = ("--vcpo-baseline", "none", "--vcpo-reward-normalization", "none")
    sentence = command_line.refusal("--vcpo-advantages", path, *none)
    assert "--vcpo-advantages" in sentence
    assert fragment in sentence


# ---------------------------------------------------------------------- tokenizer


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_refused(command_line: CommandLine) -> None:
    sentence = command_line.refusal("--vocab-size", "60")
    assert "knows 99 tokens, the model only 60" in sentence


def test_a_tokenizer_with_fewer_tokens_than_the_checkpoint_is_fine(command_line: CommandLine, checkpoint: Path) -> None:
    args, _ = command_line.check("--vcpo-load-hf", str(checkpoint), "--norm-epsilon", "1e-5")
    assert args.vocab_size == 120


def test_a_broken_tokenizer_is_refused(command_line: CommandLine) -> None:
    (command_line.tokenizer / "tokenizer.json").write_text("{}")
    assert "cannot be loaded" in command_line.refusal()


def test_a_chat_template_that_the_tokenizer_lacks_is_refused(command_line: CommandLine) -> None:
    assert "has no chat template" in command_line.refusal("--rollout-chat-template")


def test_a_tokenizer_of_another_language_is_refused(command_line: CommandLine) -> None:
    config = json.dumps({"n_digits": 3, "prompt_template": "Ж" * 3 + "{digits}"})
    assert preflight.check(*command_line.parse("--rollout-environment-config", config)).vocab_size == 99
    environment = "tests.launch.test_preflight:Cyrillic"
    assert "knows no token of the first prompt" in command_line.refusal("--rollout-environment", environment)


class Cyrillic:
    """An environment whose prompts the character tokenizer cannot write."""

    def __init__(self, **_: object) -> None: ...

    def prompt(self, index: int) -> object:
        from megatron_vcpo.environments import Prompt

        return Prompt(text="Сколько", answer="1", metadata={})

    def reward(self, prompt: object, response: str) -> float:
        return 0.0


# ---------------------------------------------------------------------- model


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        ([], "norm_epsilon is 1e-05, the checkpoint's 1e-06 (--norm-epsilon 1e-06)"),
        (["--norm-epsilon", "1e-6", "--num-layers", "3"], "--num-layers 2"),
        (["--norm-epsilon", "1e-6", "--vocab-size", "119"], "--vocab-size 119 is not the checkpoint's (120"),
        (["--norm-epsilon", "1e-6", "--add-qkv-bias"], "remove --add-qkv-bias"),
        (["--norm-epsilon", "1e-6", "--padded-vocab-size", "64"], "--padded-vocab-size 64"),
    ],
)
def test_flags_of_another_model_than_the_checkpoint_are_refused(
    command_line: CommandLine, checkpoint: Path, flags: list[str], fragment: str
) -> None:
    (checkpoint / "config.json").write_text(json.dumps(TINY | {"rms_norm_eps": 1e-6}))
    assert fragment in command_line.refusal("--vcpo-load-hf", str(checkpoint), *flags)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [("{", "is not a model configuration"), ('{"model_type": "gpt2"}', "'gpt2'"), ("{}", "model_type")],
)
def test_a_config_json_that_cannot_be_used_is_refused(
    command_line: CommandLine, checkpoint: Path, text: str, fragment: str
) -> None:
    (checkpoint / "config.json").write_text(text)
    assert fragment in command_line.refusal("--vcpo-load-hf", str(checkpoint))


def test_weights_are_looked_for_before_a_run_but_not_in_a_dry_run(command_line: CommandLine, checkpoint: Path) -> None:
    from safetensors.torch import save_file

    args, config = command_line.check("--vcpo-load-hf", str(checkpoint), "--norm-epsilon", "1e-5")
    config.vcpo.dry_run = False
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        preflight.check_model(args, config, 120)
    save_file({"w": torch.zeros(2)}, checkpoint / "model.safetensors")
    with pytest.raises(ConfigError, match=r"it lacks lm_head\.weight, .* more; it also holds w"):
        preflight.check_model(args, config, 120)


def test_a_run_that_goes_on_from_a_megatron_checkpoint_needs_no_hugging_face_weights(
    command_line: CommandLine, checkpoint: Path
) -> None:
    args, config = command_line.check("--vcpo-load-hf", str(checkpoint), "--norm-epsilon", "1e-5")
    config.vcpo.dry_run = False
    args.load = "somewhere"
    preflight.check_model(args, config, 120)


def test_a_cache_beyond_this_machine_s_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    preflight._check_cache_fits(memory // 2)
    with pytest.raises(ConfigError, match=r"for each of 2 engine rank\(s\) is more than the \d+ bytes"):
        preflight._check_cache_fits(memory // 2 + 1)


# ---------------------------------------------------------------------- the process


@pytest.mark.slow
def test_an_interrupt_while_flags_are_read_is_one_sentence_and_code_130() -> None:
    # The first thing that reading the flags imports.
    program = """
import os, signal, sys, types
def interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        print("swallowed, as some imports do")
sys.modules["megatron_vcpo.patches.megatron_cpu"] = types.SimpleNamespace(install=interrupt, patch_megatron=None)
import megatron_vcpo.patches
megatron_vcpo.patches.megatron_cpu = sys.modules["megatron_vcpo.patches.megatron_cpu"]
from megatron_vcpo.train import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=900, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr == "megatron_vcpo: interrupted before the start; nothing was begun.\n"


@pytest.mark.slow
def test_bad_input_ends_the_process_with_code_2_and_one_sentence(command_line: CommandLine, tmp_path: Path) -> None:
    flags = command_line.flags(*jsonl(tmp_path / "gone.jsonl"))
    done = subprocess.run(
        [sys.executable, "-m", "megatron_vcpo.train", *flags],
        capture_output=True, text=True, timeout=900, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("megatron_vcpo: ")
    assert "gone.jsonl" in last
