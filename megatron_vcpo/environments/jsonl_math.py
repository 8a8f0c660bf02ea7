"""Questions from a JSONL file, answers judged by math-verify. Reads GSM8K as it is."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from megatron_vcpo.environments import answers
from megatron_vcpo.environments.answers import AnswerFormat
from megatron_vcpo.environments.protocol import EnvironmentSetupError, Prompt, Split

_QUESTION_KEYS = ("question", "prompt", "problem")
_ANSWER_KEYS = ("answer", "solution")
_FORMATS = ("math", *get_args(AnswerFormat))
_GSM8K = "####"  # what follows is the answer, in the file and in a response


class JsonlMath:
    """One JSON object a line, with a question (or prompt, problem) and an answer (or solution).

    Of an answer that holds '####', as in GSM8K, the part after the last one counts; of one that holds \\boxed{...},
    the last box. Configuration: `prompt_template` with {question}; `stop`, strings that end the response;
    `answer_format`: math (default: after '####' where there is one, else where math-verify finds it), or one of
    `AnswerFormat`.
    """

    def __init__(
        self,
        *,
        split: Split,
        seed: int,
        path: str | Path,
        prompt_template: str = "{question}",
        answer_format: str = "math",
        stop: str | Sequence[str] = (),
    ) -> None:
        answers.check_format(answer_format, _FORMATS)
        if "{question}" not in prompt_template:
            raise EnvironmentSetupError("prompt_template of jsonl must contain {question}.")
        self._template = prompt_template
        self._format = answer_format
        self._stop = answers.check_stop(stop)
        self._rows = read_questions(Path(path))
        # The deadline of a reward is the reward pool's. math-verify's own uses signals and warns when it is off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        _parse("\\boxed{1}")  # loads the grammar now, not within the first reward's deadline

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, index: int) -> Prompt:
        """The question on the index-th line that is not empty, round and round."""
        question, answer = self._rows[index % len(self._rows)]
        return Prompt(text=self._template.replace("{question}", question), answer=answer)

    def reward(self, prompt: Prompt, response: str) -> float:
        """1.0 where the response's answer equals the file's mathematically, else 0.0."""
        from math_verify import verify

        given = self._given(answers.cut(response, self._stop))
        if given is None:
            return 0.0
        if given.strip() == prompt.answer:
            return 1.0
        gold = _parse(f"\\boxed{{{prompt.answer}}}")
        return float(verify(gold, _parse(given), timeout_seconds=None))

    def _given(self, response: str) -> str | None:
        if self._format != "math":
            found = answers.extract(response, self._format)  # type: ignore[arg-type]
            return None if found is None else f"\\boxed{{{found}}}" if found else ""
        if _GSM8K in response:
            response = response.rsplit(_GSM8K, 1)[1].strip()
            return response.splitlines()[0] if response else ""
        return response


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)


def read_questions(path: Path) -> list[tuple[str, str]]:
    """(question, answer) of every line. Raises EnvironmentSetupError with file and line number."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EnvironmentSetupError(f"The prompt file {path} cannot be read: {error.strerror or error}.") from error
    rows = [_row(line, f"{path} line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise EnvironmentSetupError(f"The prompt file {path} holds no questions.")
    return rows


def _row(line: bytes, where: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise EnvironmentSetupError(f"{where} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise EnvironmentSetupError(f"{where} is not a JSON object.")
    question = _field(record, _QUESTION_KEYS, where)
    answer = _field(record, _ANSWER_KEYS, where)
    if _GSM8K in answer:
        answer = answer.rsplit(_GSM8K, 1)[1]
    elif (boxed := answers.extract(answer, "boxed")) is not None:
        answer = boxed
    if not answer.strip():
        raise EnvironmentSetupError(f"{where} has an empty answer.")
    return question, answer.strip()


def _field(record: dict[str, Any], keys: Sequence[str], where: str) -> str:
    for key in keys:
        value = record.get(key)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            continue
        if str(value).strip():
            return str(value)
    present = [key for key in keys if key in record]
    if present:
        raise EnvironmentSetupError(f"{where}: {present[0]!r} must be text that is not empty (or a number).")
    raise EnvironmentSetupError(f"{where} has none of the keys {', '.join(map(repr, keys))}.")
