"""Prompts come in an order fixed by the seed, and go on in it after a resume."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vcpo.config import ConfigError
from megatron_vcpo.environments import EnvironmentSetupError, Prompt
from megatron_vcpo.environments.encoding import encode_prompt
from megatron_vcpo.rollout.sampler import PromptSampler
from tests.oracle.fake_engine import CountedCharacters
from tests.oracle.tiny_models import character_tokenizer

TOKENIZER = character_tokenizer()


def sampler(size: int | None = None, *, seed: int = 3, long: frozenset[int] = frozenset()) -> PromptSampler:
    return PromptSampler(CountedCharacters(size, long), TOKENIZER, seed=seed, max_length=20, chat=False)


def test_endless_prompts_come_one_after_another():
    drawn = sampler().draw(5)
    assert [d.prompt_index for d in drawn] == [0, 1, 2, 3, 4]
    assert [d.group_id for d in drawn] == [0, 1, 2, 3, 4]
    assert TOKENIZER.decode(drawn[3].ids) == "3:" == drawn[3].prompt.text


def test_finite_prompts_are_reshuffled_each_epoch_and_none_is_repeated_within_one():
    drawn = [d.prompt_index for d in sampler(10).draw(40)]
    epochs = list(itertools.batched(drawn, 10))
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 4


def test_the_seed_alone_decides_the_order():
    order = [d.prompt_index for d in sampler(10).draw(25)]
    assert order == [d.prompt_index for d in sampler(10).draw(25)]
    assert order != [d.prompt_index for d in sampler(10, seed=4).draw(25)]


@given(st.one_of(st.none(), st.integers(1, 7)), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 5))
def test_resumed_sampler_draws_what_the_first_would_have_drawn(size, counts, stop):
    long = frozenset({2}) if size is None or size > 3 else frozenset()
    straight = sampler(size, long=long)
    expected = [straight.draw(count) for count in counts]
    before = sampler(size, long=long)
    drawn = [before.draw(count) for count in counts[:stop]]
    after = sampler(size, long=long)
    after.load_state_dict(before.state_dict())
    drawn += [after.draw(count) for count in counts[stop:]]
    assert drawn == expected
    assert after.skipped == straight.skipped


def test_prompts_without_a_token_are_skipped_and_counted():
    class Spaced(CountedCharacters):
        def prompt(self, index):
            return Prompt(text=" ") if index % 2 else super().prompt(index)

    class Stripping:
        def encode(self, text, **options):
            return TOKENIZER.encode(text.strip(), **options)

    source = PromptSampler(Spaced(None), Stripping(), seed=3, max_length=20, chat=False)
    assert [d.prompt_index for d in source.draw(3)] == [0, 2, 4]
    assert source.skipped == 2


def test_prompts_that_are_too_long_are_skipped_and_counted():
    over_long = sampler(5, long=frozenset({1, 4}))
    drawn = over_long.draw(6)
    assert {d.prompt_index for d in drawn} == {0, 2, 3}
    assert [d.group_id for d in drawn] == list(range(6))
    assert over_long.skipped == 4


@pytest.mark.parametrize("size", [4, None])
def test_prompts_that_are_all_too_long_are_an_error_that_names_the_flag(size):
    with pytest.raises(ConfigError, match="--rollout-max-prompt-length 20"):
        sampler(size, long=frozenset(range(5000))).draw(1)


def test_environment_without_prompts_is_an_error():
    with pytest.raises(ConfigError, match="no prompts"):
        sampler(0)


@pytest.mark.parametrize(
    ("other", "flag"),
    [(sampler(6, seed=4), "--rollout-seed"), (sampler(7), "--rollout-prompts"), (sampler(), "size -1")],
)
def test_cursor_of_another_order_is_refused(other, flag):
    with pytest.raises(ConfigError, match=flag):
        sampler(6).load_state_dict(other.state_dict())


def test_chat_template_wraps_the_prompt_as_one_user_message():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    prompt, ids = encode_prompt(tokenizer, Prompt(text="1+1"), chat=True)
    assert tokenizer.decode(ids) == prompt.rendered == "[user]1+1[assistant]"
    assert prompt.text == "1+1"
    prompt, ids = encode_prompt(tokenizer, Prompt(text="1+1"), chat=False)
    assert tokenizer.decode(ids) == "1+1"
    assert prompt.rendered is None


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (Prompt(text="1\ud800"), r"The text of prompt\(2\) of the environment Odd holds a lone surrogate"),
        (Prompt(text=""), r"prompt\(2\) of the environment Odd has no text"),
        (Prompt(text=None), r"prompt\(2\) of the environment Odd has no text"),
        ("1", r"prompt\(2\) of the environment Odd is no Prompt but a str"),
    ],
)
def test_every_prompt_is_checked_where_it_is_drawn(prompt, said):
    class Odd(CountedCharacters):
        def prompt(self, index):
            return prompt if index == 2 else super().prompt(index)

    source = PromptSampler(Odd(), TOKENIZER, seed=3, max_length=20, chat=False)
    assert len(source.draw(2)) == 2
    with pytest.raises(EnvironmentSetupError, match=said):
        source.draw(1)
