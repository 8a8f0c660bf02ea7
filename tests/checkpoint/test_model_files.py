"""What belongs to a model's folder beside its weights, carried there and back: above all where a response ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from megatron_vcpo.checkpoint.convert.compare_files import file_differences
from megatron_vcpo.checkpoint.convert.source import HuggingFaceSource, MegatronSource
from megatron_vcpo.checkpoint.convert.to_hf import convert_to_hf
from megatron_vcpo.checkpoint.convert.to_megatron import ConversionOptions, convert_to_megatron
from megatron_vcpo.checkpoint.model_files import (
    RECORD,
    read_model_folder,
    read_record,
    read_tokenizer_folder,
    write_folder,
)
from megatron_vcpo.models.errors import CheckpointError
from tests.oracle import tiny_models

SECOND_END = 40  # an ordinary character
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A model with a chat template whose config.json names one end and whose generation_config.json names two."""
    folder = tiny_models.save("llama", 0, tmp_path / "hf")
    edit(folder / "generation_config.json", eos_token_id=[tiny_models.EOS, SECOND_END], temperature=0.6)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (5, None, [5]),
        ([5, 7], None, [5, 7]),
        (5, {"eos_token_id": [5, 9]}, [5, 9]),
        (5, {"eos_token_id": 8}, [8]),
        (5, {"temperature": 0.5}, [5]),
        (None, None, []),
    ],
)
def test_generation_config_overrides_config(
    config: Any, generation: dict[str, Any] | None, ends: list[int], tmp_path: Path
) -> None:
    edit(tmp_path / "config.json", model_type="llama", eos_token_id=config)
    if generation is not None:
        edit(tmp_path / "generation_config.json", **generation)
    assert read_model_folder(tmp_path).end_ids == ends


def test_what_config_json_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    edit(tmp_path / "config.json", model_type="llama")
    assert read_model_folder(tmp_path).tokens == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    edit(tmp_path / "config.json", model_type="not known here")
    assert read_model_folder(tmp_path).end_ids == []


def test_a_tokenizer_alone_says_its_own_tokens(tmp_path: Path) -> None:
    tiny_models.character_tokenizer().save_pretrained(tmp_path)
    files = read_tokenizer_folder(tmp_path)
    assert files.tokens == {"bos_token_id": None, "eos_token_id": tiny_models.EOS, "pad_token_id": tiny_models.PAD}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "[]", '{"eos_token_id": "<eos>"}', '{"eos_token_id": [1, true]}', "\ud800", None])
def test_damaged_files_are_one_sentence_with_their_name(name: str, text: str | None, tmp_path: Path) -> None:
    edit(tmp_path / "config.json", model_type="llama")
    content = b"\xff\xfe" if text is None else text.encode(errors="surrogatepass")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_model_folder(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_written_whole_and_keeps_nothing_old(hf: Path, tmp_path: Path) -> None:
    target = tmp_path / "record"
    write_folder(target, read_model_folder(hf).laid_out({"model_type": "llama"}))
    assert {path.name for path in target.iterdir()} == {
        *("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
    }
    assert file_differences(read_model_folder(hf), read_model_folder(target)) == []
    (hf / "chat_template.jinja").unlink()
    (hf / "generation_config.json").unlink()
    untouched = (target / "tokenizer.json").stat()
    write_folder(target, read_model_folder(hf).laid_out({"model_type": "llama"}))
    assert {path.name for path in target.iterdir()} == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert (target / "tokenizer.json").stat().st_ino == untouched.st_ino


def test_further_chat_templates_come_along(hf: Path, tmp_path: Path) -> None:
    (hf / "additional_chat_templates").mkdir()
    (hf / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    write_folder(tmp_path / "record", read_model_folder(hf).laid_out({"model_type": "llama"}))
    assert (tmp_path / "record" / "additional_chat_templates" / "tool_use.jinja").read_text() == TEMPLATE


# ---------------------------------------------------------------------- the comparison


def save_again(folder: Path, target: Path) -> None:
    """The same tokenizer in other files, as another release of transformers writes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(target)
    edit(target / "tokenizer_config.json", chat_template=TEMPLATE)
    edit(target / "tokenizer.json")  # without line breaks


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("config.json", {"eos_token_id": None}, "eos_token_id of config.json: 1 in A, none in B"),
        ("config.json", {"pad_token_id": 3}, "pad_token_id of config.json: 0 in A, 3 in B"),
        (
            "generation_config.json",
            {"eos_token_id": 1},
            "eos_token_id of generation_config.json: [1, 40] in A, 1 in B",
        ),
        ("generation_config.json", {"temperature": 1.0}, "temperature of generation_config.json: 0.6 in A, 1.0 in B"),
        ("generation_config.json", None, "eos_token_id of generation_config.json: [1, 40] in A, 1 in B"),
        ("chat_template.jinja", None, "tokenizer: another chat template in A and B"),
        ("tokenizer.json", None, "tokenizer: only in A"),
        ("tokenizer_config.json", {"eos_token": "<unk>"}, "tokenizer: other special tokens in A and B"),
    ],
)
def test_every_difference_is_named(
    name: str, fields: dict[str, Any] | None, said: str, hf: Path, tmp_path: Path
) -> None:
    other = tiny_models.save("llama", 0, tmp_path / "other")
    for file in ("generation_config.json", "chat_template.jinja"):
        (other / file).write_bytes((hf / file).read_bytes())
    assert file_differences(read_model_folder(hf), read_model_folder(other)) == []
    if fields is None:
        (other / name).unlink()
    else:
        edit(other / name, **fields)
    assert said in file_differences(read_model_folder(hf), read_model_folder(other))


def test_the_same_in_other_words_is_no_difference(hf: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_again(hf, other)
    edit(other / "config.json", **json.loads((hf / "config.json").read_text()) | {"eos_token_id": [tiny_models.EOS]})
    generation = json.loads((hf / "generation_config.json").read_text())
    edit(other / "generation_config.json", **generation | {"transformers_version": "4.0.0", "bos_token_id": None})
    assert (other / "tokenizer.json").read_bytes() != (hf / "tokenizer.json").read_bytes()
    assert file_differences(read_model_folder(hf), read_model_folder(other)) == []


# ---------------------------------------------------------------------- through the converters


def exported(hf: Path, folder: Path, **options: Any) -> Path:
    convert_to_megatron(hf, folder / "megatron", ConversionOptions()).folder.commit()
    convert_to_hf(MegatronSource(folder / "megatron"), folder / "back", ConversionOptions(), **options).folder.commit()
    return folder / "back"


def test_an_exported_model_ends_its_responses_like_its_source(hf: Path, tmp_path: Path, megatron_groups: Any) -> None:
    back = exported(hf, tmp_path)
    assert file_differences(read_model_folder(hf), read_model_folder(back)) == []
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == tiny_models.EOS
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == [tiny_models.EOS, SECOND_END]
    assert AutoTokenizer.from_pretrained(back).chat_template == TEMPLATE
    prompts = torch.tensor([[20, 14, 21, 32]] * 64)
    responses = []
    for folder in (hf, back):
        torch.manual_seed(3)
        whole = tiny_models.load(folder).generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=100
        )
        responses.append(whole[:, prompts.size(1) :].tolist())
    assert responses[0] == responses[1]
    ends = {tiny_models.EOS, SECOND_END}
    first = [next((i for i, token in enumerate(row) if token in ends), len(row)) for row in responses[1]]
    assert {row[i] for row, i in zip(responses[1], first) if i < len(row)} == ends
    assert all(set(row[i + 1 :]) <= {tiny_models.PAD} for row, i in zip(responses[1], first))


def test_the_record_may_stand_beside_an_iteration_or_its_run(hf: Path, tmp_path: Path, megatron_groups: Any) -> None:
    convert_to_megatron(hf, tmp_path / "megatron", ConversionOptions()).folder.commit()
    ends = [tiny_models.EOS, SECOND_END]
    for place in (tmp_path / "megatron", tmp_path / "megatron" / "release"):
        files = MegatronSource(place).files
        assert files is not None
        assert files.end_ids == ends
    (tmp_path / "megatron" / RECORD).rename(tmp_path / "megatron" / "release" / RECORD)
    assert MegatronSource(tmp_path / "megatron").files.end_ids == ends
    assert read_record(tmp_path / "megatron") is None


def test_a_tokenizer_that_is_asked_for_replaces_the_one_beside_the_checkpoint(
    hf: Path, tmp_path: Path, megatron_groups: Any
) -> None:
    chosen = tmp_path / "chosen"
    tokenizer = tiny_models.character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["~"]})
    tokenizer.save_pretrained(chosen)
    back = exported(hf, tmp_path, tokenizer=chosen)
    assert (back / "tokenizer.json").read_bytes() == (chosen / "tokenizer.json").read_bytes()
    assert not (back / "chat_template.jinja").exists()
    assert read_model_folder(back).end_ids == [tiny_models.EOS, SECOND_END]


def test_without_a_record_the_tokenizers_folder_says_all(hf: Path, tmp_path: Path, megatron_groups: Any) -> None:
    convert_to_megatron(hf, tmp_path / "megatron", ConversionOptions()).folder.commit()
    (tmp_path / "megatron" / RECORD).rename(tmp_path / "elsewhere")
    source = MegatronSource(tmp_path / "megatron")
    assert source.files is None
    convert_to_hf(source, tmp_path / "back", ConversionOptions(), tokenizer=hf).folder.commit()
    assert file_differences(read_model_folder(hf), HuggingFaceSource(tmp_path / "back").files) == []
    tiny_models.character_tokenizer().save_pretrained(tmp_path / "alone")
    convert_to_hf(source, tmp_path / "own", ConversionOptions(), tokenizer=tmp_path / "alone").folder.commit()
    assert read_model_folder(tmp_path / "own").end_ids == [tiny_models.EOS]


def test_another_generation_config_is_another_conversion(hf: Path, tmp_path: Path, megatron_groups: Any) -> None:
    convert_to_megatron(hf, tmp_path / "out", ConversionOptions()).folder.close()
    edit(hf / "generation_config.json", eos_token_id=3)
    with pytest.raises(CheckpointError, match="a conversion with another files"):
        convert_to_megatron(hf, tmp_path / "out", ConversionOptions())
