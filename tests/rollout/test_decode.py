"""What the judge sees of a response's tokens."""

from __future__ import annotations

import json

import pytest

from megatron_vcpo.config import ConfigError
from megatron_vcpo.rollout.decode import ResponseDecoder, end_tokens
from tests.oracle.tiny_models import EOS, PAD, UNK, character_tokenizer


def with_tags():
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>", "<|end|>"]})
    return tokenizer


def test_special_tokens_are_seen_and_only_those_that_end_a_response_are_left_out():
    tokenizer = with_tags()
    decode = ResponseDecoder(tokenizer)
    tagged = tokenizer.encode("<answer>2</answer>")
    assert len(tagged) == 3
    assert decode(tagged) == decode([*tagged, EOS]) == decode([*tagged, EOS, PAD, PAD]) == "<answer>2</answer>"
    assert decode([PAD, *tokenizer.encode("2"), UNK, EOS]) == "<pad>2<unk>"
    assert decode([EOS]) == decode([]) == ""


def test_end_tokens_of_the_generation_configuration_are_left_out_too(tmp_path):
    with_tags().save_pretrained(tmp_path)
    tokenizer = type(with_tags()).from_pretrained(tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end_tokens(tokenizer) == {EOS, PAD}
    for ids in ([EOS, end], end):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert end_tokens(tokenizer) == {EOS, PAD, end}
    assert ResponseDecoder(tokenizer)([*tokenizer.encode("2"), end]) == "2"
    for content in ("{", "[]", '{"eos_token_id": "x"}', "[" * 100_000):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            end_tokens(tokenizer)
