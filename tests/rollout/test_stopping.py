"""Where a response ends, from the files of each kind of start and from the flags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_vcpo.checkpoint.model_files import RECORD
from megatron_vcpo.launch import dry_run, preflight
from megatron_vcpo.rollout.stopping import describe_stops, sampling
from tests.oracle.command_line import CommandLine
from tests.oracle.tiny_models import character_tokenizer

EOS = 1


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Its tokenizer has a special token `~` beside the end of text."""
    line = CommandLine(tmp_path, monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(line.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["~"]})
    tokenizer.save_pretrained(line.tokenizer)
    return line


def ends(line: CommandLine, *flags: str) -> list[int]:
    return line.check(*flags)[1].rollout.stop_token_ids or []


def write(folder: Path, name: str, **fields: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(fields))


def start_from_tokenizer(line: CommandLine, folder: Path) -> list[str]:
    write(line.tokenizer, "config.json", model_type="llama", eos_token_id=5)
    write(line.tokenizer, "generation_config.json", eos_token_id=[5, 9])
    return []


def start_from_converted(line: CommandLine, folder: Path) -> list[str]:
    write(folder / "megatron" / RECORD, "config.json", model_type="llama", eos_token_id=5)
    write(folder / "megatron" / RECORD, "generation_config.json", eos_token_id=[5, 9])
    (folder / "megatron" / "release").mkdir()
    (folder / "megatron" / "release" / "common.pt").touch()
    (folder / "megatron" / "latest_checkpointed_iteration.txt").write_text("release")
    return ["--load", str(folder / "megatron")]


def start_from_hugging_face(line: CommandLine, folder: Path) -> list[str]:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 99, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    write(folder / "hf", "config.json", model_type="llama", tie_word_embeddings=False, eos_token_id=5, **sizes)
    write(folder / "hf", "generation_config.json", eos_token_id=[5, 9])
    return ["--vcpo-load-hf", str(folder / "hf"), "--max-position-embeddings", "64"]


STARTS = [start_from_tokenizer, start_from_converted, start_from_hugging_face]


@pytest.mark.parametrize("start", STARTS)
def test_every_start_takes_all_ends_of_its_files(
    start: Callable[[CommandLine, Path], list[str]], line: CommandLine, tmp_path: Path
) -> None:
    flags = start(line, tmp_path)
    assert ends(line, *flags) == [EOS, 5, 9]
    tilde = AutoTokenizer.from_pretrained(line.tokenizer).convert_tokens_to_ids("~")
    more = ["--rollout-stop", "~", "ab", "\n~", "--rollout-stop-token-ids", "7", "9"]
    args, config = line.check(*flags, *more)
    assert config.rollout.stop_token_ids == sorted({EOS, 5, 7, 9, tilde})
    drawn = sampling(config.rollout, 0.5)
    assert drawn.stop_token_ids == tuple(config.rollout.stop_token_ids)
    assert drawn.stop == ("~", "ab", "\n~")  # the engine looks for the text of special tokens, too
    text = dry_run.report(args, config, character_tokenizer())
    assert re.search(r"a response ends at +tokens 1 '<eos>', 5 '\"', 7 '\$', 9 '&', .*; text '~', 'ab', '\\n~'", text)


@pytest.mark.parametrize("start", STARTS)
def test_the_judge_sees_no_end_that_the_files_name(
    start: Callable[[CommandLine, Path], list[str]], line: CommandLine, tmp_path: Path
) -> None:
    inputs = preflight.check(*line.parse(*start(line, tmp_path), "--vcpo-dry-run"))
    assert inputs.files.end_ids == [5, 9]
    two = inputs.tokenizer.encode("2")
    assert inputs.decode([*two, 9]) == inputs.decode([*two, 5]) == inputs.decode([*two, EOS]) == "2"


def test_ends_of_the_engine_s_own_folder_stop_it_and_are_not_judged(line: CommandLine, tmp_path: Path) -> None:
    write(tmp_path / "engine", "config.json", model_type="llama", eos_token_id=11)
    flags = [*start_from_hugging_face(line, tmp_path), "--rollout-engine-quantization", str(tmp_path / "engine")]
    args, config = line.parse(*flags, "--vcpo-dry-run")
    inputs = preflight.check(args, config)
    assert config.rollout.stop_token_ids == [EOS, 5, 9, 11]
    two = inputs.tokenizer.encode("2")
    assert inputs.decode([*two, 11]) == inputs.decode([*two, 9]) == "2"


def test_a_tokenizer_alone_gives_its_end_of_text(line: CommandLine) -> None:
    args, config = line.check()
    assert config.rollout.stop_token_ids == [EOS]
    assert re.search(r"a response ends at +token 1$", dry_run.report(args, config), re.MULTILINE)


def test_nothing_that_ends_a_response_is_said_so(line: CommandLine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(line.tokenizer)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(line.tokenizer)
    assert describe_stops(line.check()[1].rollout) == "nothing but --rollout-max-response-length"


def test_the_tokenizer_of_another_model_is_refused(line: CommandLine, tmp_path: Path) -> None:
    flags = start_from_hugging_face(line, tmp_path)
    write(tmp_path / "hf", "generation_config.json", eos_token_id=[5, 98])
    assert ends(line, *flags) == [EOS, 5, 98]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    write(tmp_path / "hf", "config.json", **(config | {"vocab_size": 128}))
    write(tmp_path / "hf", "generation_config.json", eos_token_id=[5, 100])
    said = line.refusal(*flags, "--vocab-size", "128")
    assert "names 100 as the token that ends a response" in said
    assert said.endswith("has 99 tokens: it is the tokenizer of another model.")


@pytest.mark.parametrize("token", ["-1", "99", str(10**12)])
def test_a_stop_token_outside_the_vocabulary_is_refused(token: str, line: CommandLine) -> None:
    said = line.refusal("--vocab-size", "99", "--rollout-stop-token-ids", "3", token)
    assert f"--rollout-stop-token-ids names the stop token {token}" in said
    assert "0 to 98" in said


def test_a_file_that_names_a_token_outside_the_vocabulary_is_refused(line: CommandLine) -> None:
    write(line.tokenizer, "config.json", model_type="llama", eos_token_id=500)
    assert f"{line.tokenizer} (eos_token_id) names the stop token 500" in line.refusal()
    write(line.tokenizer, "generation_config.json", eos_token_id="<eos>")
    assert "generation_config.json holds eos_token_id '<eos>'" in line.refusal()
