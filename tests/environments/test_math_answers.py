"""Forms in which models give mathematical answers: the right ones earn their reward, the wrong ones do not."""

from __future__ import annotations

import pytest

from megatron_vcpo.environments import Prompt
from megatron_vcpo.environments.jsonl_math import JsonlMath

HEADINGS = [
    ("4", "Adding gives 4.\n\n#### Final Answer\n\n\\boxed{4}", 1),
    ("4", "#### Final Answer\n\n\\boxed{5}", 0),
    ("4", "#### Answer\n4", 1),
    ("4", "##### Final Answer\n\\boxed{4}", 1),
    ("4", "#### Step 2: Add\n\nThe answer is 4.", 1),
    ("2", "#### Step 2: Add\n\nThe answer is 4.", 0),
    ("4", "#### 2. Final Answer\n\n\\boxed{4}", 1),
    ("2", "#### 2. Final Answer\n\n\\boxed{4}", 0),
    ("4", "#### The 2 lines that follow\n\\boxed{4}", 1),
    ("4", "\\boxed{4}\n\n#### Verification\n\n3 + 3 = 6 is not it.", 1),
    ("72", "#### 72\n\n#### Explanation\nBecause 48 + 24 = 72, and 5 is odd.", 1),
    ("72", "#### 71\n\n#### Final Answer\n\\boxed{72}", 1),
    ("72", "#### 71\n\\boxed{72}", 0),
    ("72", "#### 72. I hope it is correct.", 1),
    ("4", "#### Final Answer: 4", 1),
    ("4", "#### **Final Answer**: 4", 1),
    ("4", "#### The answer is 4.", 1),
    ("4", "#### **4**", 1),
    ("4", "#### $4", 1),
    ("4", "#### \\(4\\)", 1),
    ("4", "#### \\boxed{4}", 1),
    ("4", "#### 4 apples each day for 3 days", 1),
    ("3", "#### 4 apples each day for 3 days", 0),
    ("7", "#### 4 + 3 = 7", 1),
    ("4", "#### x = 4", 1),
    ("4", "", 0),
    ("4", "####", 0),
]
BOXES = [
    ("4", "\\boxed{3} no \\boxed{4}", 1),
    ("3", "\\boxed{3} no \\boxed{4}", 0),
    ("4", "\\boxed{4} and 7 more words.", 1),
    ("4", "\\boxed{\\boxed{4}}", 1),
    ("4", "\\boxed{4}, which I put into \\boxed{}.", 1),
    ("4", "\\fbox{4}", 1),
    ("4", "\\boxed {4}", 1),
    ("4", "\\[\n\\boxed{\n4\n}\n\\]", 1),
    ("4", "\\boxed{4", 0),
    ("4", "\\boxed{4} \\boxed{", 0),
    ("4", "\\boxed{3 or \\boxed{4}", 1),
    ("4", "\\boxed{}", 0),
    ("4", "\\boxed{4.}", 1),
    ("4", "\\boxed{4\\text{ apples}}", 1),
    ("4", "\\boxed{4\\,\\mathrm{km}}", 1),
    ("4", "\\boxed{\\$4}", 1),
    ("4", "\\boxed{x = 4}", 1),
    ("4", "\\boxed{3, 4}", 0),
    ("4", "\\boxed{3} or \\boxed{4}", 0),
    ("3, 4", "\\boxed{3} and \\boxed{4}", 1),
    ("4", "\\boxed{4}, \\boxed{4}", 1),
    ("1/2", "\\boxed{\\dfrac12}", 1),
    ("\\frac{1}{2}", "\\boxed{\\frac{2}{\\sqrt{16}}}", 1),
    ("\\left\\{1, 2\\right\\}", "\\boxed{\\left\\{2, 1\\right\\}}", 1),
    ("x>4", "\\boxed{\\left\\{x : x>4\\right.}", 0),
    ("1200", "\\boxed{1\\,200}", 1),
    ("1200", "\\boxed{1 200}", 1),
    ("201", "\\boxed{1 200}", 0),
    ("1 1/2", "\\boxed{1\\frac{1}{2}}", 1),
    ("1 1/2", "\\boxed{1.5}", 1),
    ("1 1/2", "\\boxed{1}", 0),
    ("18 dollars", "\\boxed{18}", 1),
    ("18 dollars", "\\boxed{19}", 0),
    ("4 million", "\\boxed{4}", 0),
]
SIGNS_AND_SCALES = [
    ("-3", "#### - 3", 1),
    ("3", "#### - 3", 0),
    ("-3", "#### \u22123", 1),
    ("-3", "#### -$3.00", 1),
    ("-3", "#### negative 3", 1),
    ("3", "#### negative 3", 0),
    ("-3", "#### minus 3 degrees", 1),
    ("-3", "#### Final Answer\n\u22123", 1),
    ("-3", "The answer is \u22123.", 1),
    ("-3", "\\boxed{\u20133}", 1),
    ("-3", "\\boxed{-\\$3}", 1),
    ("2", "\\boxed{5 - 3}", 1),
    ("7", "We have:\n- 3 apples\n- 4 pears\nThe answer is 7.", 1),
    ("2500000", "#### $2.5 million", 1),
    ("2.5", "#### 2.5 million", 0),
    ("3", "#### 3 thousand dollars", 0),
    ("3000", "#### 3 thousand dollars", 1),
    ("3 dozen", "#### 36 eggs", 1),
    ("2500000", "\\boxed{2.5\\text{ million}}", 1),
    ("2.5 million", "\\boxed{2500000}", 1),
    ("750000", "#### 3/4 million", 0),
    ("5", "9" * 100_000, 0),
]
WORDS = [
    ("Paris", "\\boxed{\\text{Paris}}", 1),
    ("Paris", "\\boxed{Pairs}", 0),
    ("no", "\\boxed{on}", 0),
    ("yes", "\\boxed{Yes}", 1),
    ("yes", "\\boxed{no}", 0),
    ("New York", "\\boxed{\\text{new York}}", 1),
    ("\\text{Evelyn}", "\\boxed{Evelyn}", 1),
    ("Paris", "#### Final Answer\n\n**Paris**", 1),
    ("Paris", "#### Answer: Paris.", 1),
    ("Paris", "The answer is London.\n#### Paris", 1),
    ("Paris", "The answer is **Paris**.", 1),
    ("Paris", "The answer is Paris or London.", 0),
    ("Paris", "Paris is large.", 0),
    ("B", "\\boxed{\\textbf{(B)}}", 1),
    ("B", "\\boxed{\\text{(C)}}", 0),
    ("xyz", "\\boxed{zyx}", 1),
]
REASONING = [
    ("10", "<think>maybe \\boxed{9}</think> \\boxed{10}", 1),
    ("9", "<think>maybe \\boxed{9}</think> \\boxed{10}", 0),
    ("9", "<think>maybe \\boxed{9} or", 0),
    ("9", "maybe \\boxed{9}</think> I do not know", 0),
    ("9", "<think>#### 9</think> no idea", 0),
]


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "?", "answer": "1"}\n')
    return lambda **options: JsonlMath(split="train", seed=0, path=path, **options)


@pytest.mark.parametrize(("answer", "response", "reward"), HEADINGS + BOXES + SIGNS_AND_SCALES + WORDS + REASONING)
def test_an_answer_is_found_where_it_stands(task, answer, response, reward):
    assert task().reward(Prompt(text="?", answer=answer), response) == reward


@pytest.mark.parametrize(
    ("answer_format", "response", "reward"),
    [
        ("tag", "<answer>\\boxed{4}</answer>", 1),
        ("tag", "<answer>The answer is 4.</answer>", 1),
        ("tag", "<answer>3 or 4</answer>", 0),
        ("tag", "<answer><answer>4</answer>", 1),
        ("tag", "<answer></answer>", 0),
        ("tag", "<think><answer>3</answer></think><answer>4</answer>", 1),
        ("tag", "<think><answer>4</answer></think>", 0),
        ("boxed", "\\boxed{3} no \\boxed {4}", 1),
        ("boxed", "\\fbox{4}", 1),
        ("boxed", "4", 0),
        ("last-line", "so\n**Answer:** 4", 1),
        ("first-line", "<think>\n3\n</think>\n4\n5", 1),
        ("raw", "4.", 1),
    ],
)
def test_what_another_format_finds_is_the_whole_answer(task, answer_format, response, reward):
    assert task(answer_format=answer_format).reward(Prompt(text="?", answer="4"), response) == reward


def test_without_markers_reasoning_is_judged_too(task):
    prompt = Prompt(text="?", answer="9")
    assert task(reasoning=[]).reward(prompt, "<think>maybe \\boxed{9} or") == 1.0


def test_a_thousand_boxes_that_never_end_are_read_in_no_time(task):
    assert task().reward(Prompt(text="?", answer="4"), "\\boxed{" * 100_000) == 0.0
