"""Where answers are found in responses."""

from __future__ import annotations

import pytest

from megatron_vcpo.environments import answers


@pytest.mark.parametrize(
    ("answer_format", "response", "answer"),
    [
        ("raw", " 12 \n", "12"),
        ("raw", "", ""),
        ("last-line", "2 + 2 = 4\nAnswer: 4\n\n", "4"),
        ("last-line", "The answer is: 4", "4"),
        ("last-line", "the final ANSWER: x: y", "x: y"),
        ("last-line", "first\nsecond", "second"),
        ("last-line", " \n", None),
        ("first-line", "\n answer: first\nsecond", "first"),
        ("tag", "<answer>3</answer> no, <ANSWER> 4\n</ANSWER> done", "4"),
        ("tag", "<answer>3", None),
        ("boxed", r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", None),
        ("boxed", "1", None),
        ("boxed", r"\boxed{1} and \boxed{2", None),
        ("boxed", r"\boxed{\left\{x\right.} and \fbox {2} \boxed{}", "2"),
        ("boxed", r"\boxed{\text{a \boxed{b} c}}", r"\text{a \boxed{b} c}"),
        ("tag", "<answer>3<answer>4</answer>", "4"),
    ],
)
def test_answer_is_found_in_its_format(answer_format, response, answer):
    assert answers.extract(response, answer_format) == answer
