"""Questions from a file: the formats that are read, the answers that count, and what a bad line says."""

from __future__ import annotations

import json
import os
import signal

import pytest

from megatron_vcpo.environments import EnvironmentSetupError
from megatron_vcpo.environments.jsonl_math import JsonlMath

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72 altogether.\n#### 72"


@pytest.fixture
def write(tmp_path):
    def write(*records, raw: bytes | None = None):
        path = tmp_path / "questions.jsonl"
        path.write_bytes(raw if raw is not None else "".join(json.dumps(r) + "\n" for r in records).encode())
        return path

    return write


def build(path, **config) -> JsonlMath:
    return JsonlMath(split="train", seed=0, path=path, **config)


def test_gsm8k_lines_and_other_key_names_are_read(write):
    path = write(
        {"question": "clips?", "answer": GSM8K},
        {"prompt": "half?", "solution": r"We see $\boxed{\frac{1}{2}}$."},
        {"problem": "both?", "answer": r"$\boxed{1}$ is none: $\boxed{3}$ and $\boxed{4}$."},
        {"problem": "seven?", "answer": 7},
        {"question": "many?", "answer": "#### 1,200"},
    )
    task = build(path, prompt_template="Q: {question}\nA:")
    assert len(task) == 5
    assert [task.prompt(i).answer for i in range(5)] == ["72", r"\frac{1}{2}", "3, 4", "7", "1,200"]
    assert task.prompt(0).text == "Q: clips?\nA:"


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        (GSM8K, "24 + 48 = 72\n#### 72", 1),
        (GSM8K, "#### 71 so 72\n#### 72\n", 1),
        (GSM8K, "72 it is\n#### 71", 0),
        (GSM8K, "#### ", 0),
        (GSM8K, "The answer is 72.", 1),
        (GSM8K, "The answer is $72.00", 1),
        (GSM8K, r"\boxed{72}", 1),
        (GSM8K, "72 or 73", 0),
        (GSM8K, "", 0),
        (GSM8K, "no idea", 0),
        ("#### 1,234", "#### 1234", 1),
        ("#### 1234", "that is 1,234", 1),
        ("1/2", "0.5", 1),
        (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", 1),
        ("-3", "#### -3", 1),
        ("-3", "#### 3", 0),
        ("Paris", "Paris", 1),
        ("Paris", r"\boxed{Paris}", 1),
        ("Paris", "London", 0),
    ],
)
def test_answers_are_judged_by_their_value(write, answer, response, reward):
    task = build(write({"question": "?", "answer": answer}))
    assert task.reward(task.prompt(0), response) == reward


def test_answer_format_and_stop_choose_what_is_judged(write):
    path = write({"question": "?", "answer": "72"})
    tagged = build(path, answer_format="tag")
    assert tagged.reward(tagged.prompt(0), "<answer>72</answer>, not 5") == 1.0
    assert tagged.reward(tagged.prompt(0), "72") == 0.0
    stopped = build(path, stop="Q:")
    assert stopped.reward(stopped.prompt(0), "72\nQ: 5?") == 1.0


def test_math_verify_s_signal_timers_are_off(write, monkeypatch):
    task = build(write({"question": "?", "answer": "72"}))
    monkeypatch.setattr(signal, "alarm", lambda seconds: pytest.fail("a timer was set"))
    assert task.reward(task.prompt(0), "it is 72") == 1.0


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"question": "a", "answer": "1"}\n\n{"question": "b", "answer"\n', "line 3 is not JSON"),
        (b'{"question": "a", "answer": "1"}\n"text"\n', "line 2 is not a JSON object"),
        (b'{"question": "a"}\n', "line 1 has none of the keys 'answer', 'solution'"),
        (b'{"text": "a", "answer": "1"}\n', "line 1 has none of the keys 'question'"),
        (b'{"question": "", "answer": "1"}\n', "line 1: 'question' must be text that is not empty"),
        (b'{"question": "a", "answer": null}\n', "line 1: 'answer' must be text"),
        (b'{"question": "a", "answer": ["1"]}\n', "line 1: 'answer' must be text"),
        (b'{"question": "a", "answer": "so #### "}\n', "line 1 has an empty answer"),
        (b'{"question": "\xff", "answer": "1"}\n', r"line 1 is not UTF-8 text \(byte 0xff at position 14\)"),
        ('{"question": "a", "answer": "1"}\n'.encode("utf-16"), r"line 1 is not UTF-8 text"),
        (
            b'{"question": "a", "answer": "1"}\n{"question": "12\\ud800", "answer": "1"}\n',
            "line 2: 'question' holds a lone",
        ),
        (
            b'{"question": "a", "answer": "1\\udfff"}\n',
            r"line 1: 'answer' holds a lone surrogate \(.udfff at character 1\)",
        ),
        (
            b'{"question": "a", "answer": NaN}\n',
            r"line 1: 'answer' must be text that is not empty \(or a finite number\)",
        ),
        (b'{"question": "a", "answer": -Infinity}\n', "line 1: 'answer' must be text"),
        (b'{"question": "a", "answer": 1e999999}\n', "line 1: 'answer' must be text"),
        (b'{"question": "a", "answer": true}\n', "line 1: 'answer' must be text"),
        (
            b'{"question": "a", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "line 1 is not JSON: it is nested too",
        ),
        (b'{"question": "a", "answer": ' + b"9" * 5000 + b"}", "line 1 is not JSON: Exceeds"),
        (b'{"question": "a", "question": "b", "answer": "1"}\n', "the key 'question' stands twice"),
        (b"", "holds no questions"),
        (b"\n \n", "holds no questions"),
    ],
)
def test_bad_file_is_named_with_the_line(write, raw, said):
    path = write(raw=raw)
    with pytest.raises(EnvironmentSetupError, match=said) as raised:
        build(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_file_that_is_not_there_and_a_folder_are_named(tmp_path):
    with pytest.raises(EnvironmentSetupError, match=r"none\.jsonl cannot be read: No such file"):
        build(tmp_path / "none.jsonl")
    with pytest.raises(EnvironmentSetupError, match="cannot be read: Is a directory"):
        build(tmp_path)


def test_a_pipe_is_refused_before_it_is_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EnvironmentSetupError, match="is a pipe or a device"):
        build(tmp_path / "pipe")


def test_numbers_are_written_out_and_an_empty_cell_of_a_table_is_passed_over(write):
    path = write(
        raw=b'{"question": 12, "answer": 0.10}\n{"question": "a", "answer": 1e22}\n'
        b'{"question": "a", "answer": NaN, "solution": "3"}\n'
    )
    task = build(path)
    assert task.prompt(0).text == "12"
    assert [task.prompt(i).answer for i in range(3)] == ["0.10", "1" + "0" * 22, "3"]


def test_template_without_the_question_is_refused(write):
    with pytest.raises(EnvironmentSetupError, match=r"\{question\}"):
        build(write({"question": "?", "answer": "1"}), prompt_template="{problem}")


def test_windows_line_ends_and_a_byte_order_mark_are_read(write):
    path = write(raw=b'\xef\xbb\xbf{"question": "a", "answer": "1"}\r\n{"question": "b", "answer": "2"}\r\n')
    assert len(build(path)) == 2
