"""What the judge sees of a response's tokens."""

from __future__ import annotations

from megatron_vcpo.rollout.decode import ResponseDecoder
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


def test_tokens_that_the_model_s_files_name_as_ends_are_left_out_at_the_end_alone():
    tokenizer = with_tags()
    end, tag = tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.convert_tokens_to_ids("</answer>")
    decode = ResponseDecoder(tokenizer, [EOS, end])
    two = tokenizer.encode("2")
    assert decode([*two, end]) == decode([*two, end, EOS]) == "2"
    assert decode([*two, end, *two]) == "2<|end|>2"
    assert decode([*two, tag]) == "2</answer>"
