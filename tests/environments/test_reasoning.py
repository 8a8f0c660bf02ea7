"""Reasoning blocks are not judged, and a response that ends within one has no answer."""

from __future__ import annotations

import pytest

from megatron_vcpo.environments import EnvironmentSetupError, Prompt
from megatron_vcpo.environments.reasoning import MARKERS, ResponseReader, judged_part, open_end
from megatron_vcpo.environments.sort_digits import SortDigits


@pytest.mark.parametrize(("begin", "end"), MARKERS)
def test_a_block_in_every_model_s_writing_is_left_out(begin, end):
    assert judged_part(f"{begin}9?{end} 10", MARKERS) == "  10"
    assert judged_part(f"9?{end} 10", MARKERS) == " 10"
    assert judged_part(f"{begin}9?", MARKERS) is None


@pytest.mark.parametrize(
    ("response", "judged"),
    [
        ("10", "10"),
        ("", ""),
        ("<THINK>9</think>10", " 10"),
        ("a<think>9</think>b<think>8</think>c", "a b c"),
        ("<think>9<think>8</think>10", " 10"),
        ("<think>9</think>8</think>10", "10"),
        ("<think>9</reasoning>8</think>10", " 10"),
        ("9</think>8<think>7", None),
        ("10 <think>7", None),
        ("10\nQ: <think>7", "10"),
        ("<think>9\nQ: 8</think>10\nQ: 7", " 10"),
        ("9\nQ: 8</think>10", "10"),
        ("a < b and <thin k>", "a < b and <thin k>"),
    ],
)
def test_what_stands_outside_of_blocks_and_before_the_stop_string_is_judged(response, judged):
    assert judged_part(response, MARKERS, ("\nQ:",)) == judged


def test_without_markers_everything_before_the_first_stop_string_is_judged():
    assert judged_part("<think>9</think>12\nQ: 3", (), ("Q:", "\n")) == "<think>9</think>12"
    assert judged_part("12", (), ("\n",)) == "12"
    assert judged_part("12", ()) == "12"


def test_a_block_that_the_prompt_opens_has_to_end_in_the_response():
    reader = ResponseReader(stop=(), reasoning=MARKERS)
    rendered = Prompt(text="9?", rendered="[user]9?[assistant]<think>\n")
    for prompt in (rendered, Prompt(text="9? <think>")):
        assert reader.read(prompt, "9") is None
        assert reader.read(prompt, "9</think>10") == "10"
        assert reader.read(prompt, "<think>9</think>10") == "10"
        assert reader.read(prompt, "9</think>10<think>8") is None
    for prompt in (Prompt(text="9?"), Prompt(text="<think>", rendered="<think>\n\n</think>\n\n")):
        assert reader.read(prompt, "9") == "9"
    assert open_end("9? <think>", ()) is None


def test_markers_of_one_s_own_replace_the_known_ones():
    reader = ResponseReader(stop="\n", reasoning=[["<plan>", "</plan>"]])
    assert reader.read(Prompt(text="?"), "<plan>\n9</plan><think>10\n8") == " <think>10"


@pytest.mark.parametrize(
    "markers", ["<think>", [["<think>"]], ["<think>", "</think>"], [["", "</think>"]], None, [[1, 2]]]
)
def test_markers_that_are_no_pairs_are_refused(markers):
    with pytest.raises(EnvironmentSetupError, match="reasoning must be a list of pairs"):
        ResponseReader(stop=(), reasoning=markers)


def test_sorted_digits_after_a_thought_are_right():
    task = SortDigits(split="train", seed=0)
    prompt = task.prompt(0)
    assert task.reward(prompt, f"<think>\nlet me see\n</think>{prompt.answer}\nmore") == 1.0
    assert task.reward(prompt, f"<think>{prompt.answer}\n") == 0.0
