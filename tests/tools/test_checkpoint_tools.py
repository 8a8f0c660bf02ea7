"""The command lines over the converters: what they print, refuse and return."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.char_tokenizer import write_char_tokenizer
from megatron_vcpo.commands import convert_hf_to_megatron, convert_megatron_to_hf, verify_checkpoint
from tests.oracle.model_pairs import VOCAB, save_hf_model
from tests.oracle.single_process import single_process_megatron

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def megatron_groups() -> Any:
    with single_process_megatron() as groups:
        yield groups


def change(folder: Path, name: str, edit: Any) -> None:
    state = load_file(folder / "model.safetensors")
    state[name] = edit(state[name])
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_there_and_back_with_verification(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_hf_model(tmp_path / "hf", "qwen3", tied=True)
    for name in ("hf", "tokenizer"):
        write_char_tokenizer(tmp_path / name)
    made, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    there = [str(tmp_path / "hf"), made, "--verify", "--target-tensor-parallel-size", "2"]
    assert convert_hf_to_megatron.main(there) == 0
    output = capsys.readouterr()
    assert "24 tensors equal bit for bit, 0 equal after rounding" in output.err
    assert "logits: largest difference" in output.err
    assert "--padded-vocab-size 256" in output.out
    assert "converting: 100%" in output.err  # the bar's sum is right
    assert "verifying: 100%" in output.err
    assert (tmp_path / "megatron" / "megatron_flags.sh").read_text() == output.out

    tokenizer = ["--tokenizer", str(tmp_path / "tokenizer"), "--quiet"]
    assert convert_megatron_to_hf.main([made, back, "--verify", "ledger", *tokenizer, "--shard-size", "20KB"]) == 0
    output = capsys.readouterr()
    assert "tensors equal" in output.err
    assert "logits" not in output.err
    assert "%|" not in output.err
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "back").iterdir()}
    assert modes == {(tmp_path / "hf" / "config.json").stat().st_mode & 0o777}
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert verify_checkpoint.main([str(tmp_path / "hf"), back, "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the same model"

    assert convert_hf_to_megatron.main(there) == 1
    assert capsys.readouterr().err.strip().endswith("choose another folder or give --overwrite.")
    assert convert_hf_to_megatron.main([*there, "--overwrite", "--quiet", "--dtype", "bf16"]) == 0
    assert verify_checkpoint.main([made, back, "--quiet"]) == 0  # bf16 against fp32
    assert "0 tensors equal bit for bit, 24 equal after rounding" in capsys.readouterr().out


def test_one_changed_value_is_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        save_hf_model(tmp_path / name, "llama", tied=True)

    def nudge(tensor: torch.Tensor) -> torch.Tensor:
        tensor[2, 3] += 0.25
        return tensor

    change(tmp_path / "b", "model.layers.1.mlp.down_proj.weight", nudge)
    assert verify_checkpoint.main([str(tmp_path / "a"), str(tmp_path / "b"), "--quiet"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model.layers.1.mlp.down_proj.weight: values (largest difference 0.25")
    assert "19 tensors equal bit for bit" in lines[1]
    assert "1 different" in lines[1]
    assert lines[-1] == "not the same model"


def test_another_setting_is_another_model_though_all_tensors_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        save_hf_model(tmp_path / name, "llama", tied=True)
    config = tmp_path / "b" / "config.json"
    fields = json.loads(config.read_text())
    fields["rms_norm_eps"] = 1e-3
    config.write_text(json.dumps(fields))
    assert verify_checkpoint.main([str(tmp_path / "a"), str(tmp_path / "b"), "--quiet", "--no-logits"]) == 3
    assert "norm_epsilon: 1e-05 in A, 0.001 in B" in capsys.readouterr().out


def test_a_model_that_ends_its_responses_elsewhere_is_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, made, back = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    save_hf_model(hf, "llama", tied=True)
    write_char_tokenizer(hf)
    (hf / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert convert_hf_to_megatron.main([str(hf), str(made), "--verify", "--quiet"]) == 0
    assert convert_megatron_to_hf.main([str(made), str(back), "--verify", "--quiet"]) == 0
    for a, b in ((hf, made), (made, back), (hf, back)):
        assert verify_checkpoint.main([str(a), str(b), "--quiet", "--no-logits"]) == 0
    (back / "generation_config.json").unlink()
    capsys.readouterr()
    for a in (hf, made):
        assert verify_checkpoint.main([str(a), str(back), "--quiet", "--no-logits"]) == 3
        output = capsys.readouterr().out
        assert "eos_token_id of generation_config.json: [2, 7] in A, 2 in B" in output
        assert "20 tensors equal bit for bit" in output


def test_a_checkpoint_that_says_nothing_of_its_tokens_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, made, back = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    save_hf_model(hf, "llama", tied=True)
    assert convert_hf_to_megatron.main([str(hf), str(made), "--quiet"]) == 0
    shutil.rmtree(made / "huggingface")
    capsys.readouterr()
    assert convert_megatron_to_hf.main([str(made), str(back), "--verify", "--quiet"]) == 0
    assert "says where a response of the model ends" in capsys.readouterr().err
    assert verify_checkpoint.main([str(hf), str(made), "--quiet", "--no-logits"]) == 0
    assert f"not compared beside the weights: nothing beside {made / 'release'}" in capsys.readouterr().out


@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_conversion_that_loses_the_models_files_is_not_published(
    direction: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_vcpo.checkpoint.convert import to_hf as convert_to_hf
    from megatron_vcpo.checkpoint.convert import to_megatron as convert_to_megatron

    hf, made = tmp_path / "hf", tmp_path / "megatron"
    save_hf_model(hf, "llama", tied=True)
    write_char_tokenizer(hf)
    (hf / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    if direction == "back":
        assert convert_hf_to_megatron.main([str(hf), str(made), "--quiet"]) == 0
    right = convert_to_hf.write_into

    def lose(folder: Any, entries: dict[str, Any], **options: str) -> None:
        right(folder, {k: v for k, v in entries.items() if k != "generation_config.json"}, **options)

    for module in (convert_to_hf, convert_to_megatron):
        monkeypatch.setattr(module, "write_into", lose)
    tool, source = (convert_hf_to_megatron, hf) if direction == "there" else (convert_megatron_to_hf, made)
    assert tool.main([str(source), str(tmp_path / "out"), "--verify", "ledger", "--quiet"]) == 1
    assert "is wrong (the files beside the weights differ)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_models_of_other_sizes_are_compared_by_what_they_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_hf_model(tmp_path / "a", "llama", tied=True)
    save_hf_model(tmp_path / "b", "llama", tied=False, vocab_size=VOCAB + 3)
    assert verify_checkpoint.main([str(tmp_path / "a"), str(tmp_path / "b"), "--quiet"]) == 3
    output = capsys.readouterr().out
    assert "only in B: lm_head.weight" in output
    assert f"vocab_size: {VOCAB} in A, {VOCAB + 3} in B" in output
    assert f"model.embed_tokens.weight: shape ({VOCAB}, 32) in A, ({VOCAB + 3}, 32) in B" in output


def test_a_conversion_that_is_wrong_is_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_vcpo.checkpoint.convert import to_megatron as convert_to_megatron

    save_hf_model(tmp_path / "hf", "llama", tied=True)
    right = convert_to_megatron.convert
    monkeypatch.setattr(convert_to_megatron, "convert", lambda tensor, *rest: right(tensor, *rest) + 1e-4)
    assert convert_hf_to_megatron.main([str(tmp_path / "hf"), str(tmp_path / "out"), "--verify", "--quiet"]) == 1
    output = capsys.readouterr()
    assert "is wrong (tensors differ)" in output.err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_its_true_vocabulary_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_vcpo.checkpoint.convert import to_megatron as module

    save_hf_model(tmp_path / "hf", "llama", tied=True)
    save = module._save

    def forget(strategy: Any, source: Any, entries: Any, path: Any, args: Any, options: Any) -> None:
        args.vocab_size = None
        save(strategy, source, entries, path, args, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_save", forget)
        assert convert_hf_to_megatron.main([str(tmp_path / "hf"), str(tmp_path / "megatron"), "--quiet"]) == 0
    arguments = [str(tmp_path / "megatron"), str(tmp_path / "back"), "--quiet"]
    assert convert_megatron_to_hf.main(arguments) == 1
    assert "only the padded 128; give --vocab-size." in capsys.readouterr().err
    for size in ("0", "129", "-3"):
        assert convert_megatron_to_hf.main([*arguments, "--vocab-size", size]) == 1
        assert f"--vocab-size {size} cannot be the true vocabulary" in capsys.readouterr().err
    assert convert_megatron_to_hf.main([*arguments, "--vocab-size", str(VOCAB)]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("size", ["5 bananas", "0", "-1GB", "1.5GB"])
def test_a_size_that_is_none_is_refused_by_the_parser(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        convert_hf_to_megatron.main(["a", "b", f"--shard-size={size}"])
    assert caught.value.code == 2
    assert "is not a size such as 5GB" in capsys.readouterr().err


@pytest.mark.slow
def test_run_by_its_path_a_tool_says_only_its_own_words(tmp_path: Path) -> None:
    save_hf_model(tmp_path / "hf", "llama", tied=True)
    command = [sys.executable, str(ROOT / "tools" / "convert_hf_to_megatron.py"), "hf", "out", "--verify", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 3
    assert said[0].startswith("20 tensors equal bit for bit")
    assert said[1].startswith("logits: ")
    assert said[2] == f"# written to {tmp_path / 'out'}"
    assert done.stdout.startswith("MODEL_ARGS=(\n")
    assert f"--load {tmp_path / 'out'}" in done.stdout


def refused(tool: Any, capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one sentence with which a tool ends."""
    assert tool.main([*map(str, arguments), "--quiet"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_vocabulary_or_iteration_that_is_not_the_checkpoints_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_hf_model(tmp_path / "hf", "llama", tied=True)
    hf, megatron, back = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    assert convert_hf_to_megatron.main([str(hf), str(megatron), "--quiet"]) == 0
    capsys.readouterr()
    for size in ("5", "0", "500"):
        said = f"records a vocabulary of {VOCAB}, not --vocab-size {size}; drop the flag."
        assert said in refused(convert_megatron_to_hf, capsys, megatron, back, "--vocab-size", size)
        assert said in refused(verify_checkpoint, capsys, megatron, hf, "--vocab-size", size)
        assert said in refused(verify_checkpoint, capsys, hf, hf, "--vocab-size", size)
    assert "has no iteration 3; drop --step-a" in refused(verify_checkpoint, capsys, hf, megatron, "--step-a", "3")
    assert "is the folder of one iteration, and not of 3" in refused(
        convert_megatron_to_hf, capsys, megatron / "release", back, "--step", "3"
    )
    assert not list(tmp_path.glob("back*"))


@pytest.mark.parametrize(
    "content", [b"", b'{"sharded_back', b"\x80\xff\x00", b"[]", b"{}"], ids=["empty", "cut", "binary", "list", "object"]
)
def test_a_damaged_metadata_json_is_one_sentence(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (".metadata", "metadata.json"):
        (tmp_path / name).write_bytes(content)
    for tool in (convert_megatron_to_hf, verify_checkpoint):
        assert "metadata.json is damaged" in refused(tool, capsys, tmp_path, tmp_path / "out")


def test_sizes_and_targets_that_cannot_be_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_hf_model(tmp_path / "hf", "llama", tied=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    zero = ("--target-tensor-parallel-size", "0")
    assert "must be at least 1" in refused(convert_hf_to_megatron, capsys, tmp_path / "hf", tmp_path / "out", *zero)
    assert "not the name of a folder" in refused(convert_hf_to_megatron, capsys, tmp_path / "hf", "/")
    assert "is a symbolic link" in refused(convert_hf_to_megatron, capsys, tmp_path / "hf", tmp_path / "link")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "link"}


def test_a_model_whose_sizes_do_not_fit_each_other_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_hf_model(tmp_path / "hf", "llama", tied=True)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_key_value_heads": 3}))
    said = refused(verify_checkpoint, capsys, tmp_path / "hf", tmp_path / "hf")
    assert "4 attention heads do not divide into 3 query groups" in said
