"""Questions from a JSONL file, judged by math-verify."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megatron_vcpo.environments.protocol import EnvironmentSetupError, Prompt, Split

_QUESTION_KEYS = ("question", "prompt", "problem")
_ANSWER_KEYS = ("answer", "solution")
_GSM8K = re.compile(r"####\s*(.+?)\s*$")


class JsonlMathEnvironment:
    """One question a line; an answer of GSM8K's kind ('... #### 72') is cut to what follows the marks."""

    def __init__(self, *, split: Split, seed: int, path: str, prompt_template: str = "{question}") -> None:
        r"""Read the file.

        Args:
            split: unused: each split has a file of its own.
            seed: unused: the sampler shuffles.
            path: the file; each line an object with question (or prompt, problem) and answer (or solution).
            prompt_template: text around the question, '{question}' in it.

        Raises:
            EnvironmentSetupError: a missing, empty or malformed file; the line is named.
        """
        if "{question}" not in prompt_template:
            raise EnvironmentSetupError("prompt_template must contain '{question}'.")
        self._template = prompt_template
        self._items = read_questions(Path(path))

    def __len__(self) -> int:
        return len(self._items)

    def prompt(self, index: int) -> Prompt:
        """The question on the index-th line (counted from 0, round and round)."""
        question, answer = self._items[index % len(self._items)]
        return Prompt(text=self._template.replace("{question}", question), answer=answer)

    def reward(self, prompt: Prompt, response: str) -> float:
        """1 where the response's final answer equals the file's, mathematically; else 0."""
        # Its own time limits work by signals, which only the main thread may set; the deadline here is the reward's.
        from math_verify import parse, verify

        gold = parse(f"${prompt.answer}$", parsing_timeout=None)
        answer = parse(final_answer(response), parsing_timeout=None)
        return float(verify(gold, answer, timeout_seconds=None))


def read_questions(path: Path) -> list[tuple[str, str]]:
    """(question, final answer) of every line; blank lines are skipped."""
    if not path.is_file():
        raise EnvironmentSetupError(f"There is no prompt file {path}.")
    items = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut JSON strings at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentSetupError(f"{path} cannot be read as UTF-8 text: {error}.") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            items.append(_parse(line, f"{path}, line {number}"))
    if not items:
        raise EnvironmentSetupError(f"{path} holds no question.")
    return items


def _parse(line: str, where: str) -> tuple[str, str]:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise EnvironmentSetupError(f"{where}: not JSON ({error.msg} at column {error.colno}).") from error
    if not isinstance(record, dict):
        raise EnvironmentSetupError(f"{where}: not a JSON object.")
    return _field(record, _QUESTION_KEYS, where), final_answer(_field(record, _ANSWER_KEYS, where))


def _field(record: dict[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        value = record.get(name)
        if isinstance(value, str | int | float) and str(value).strip():
            return str(value).strip()
    raise EnvironmentSetupError(f"{where}: no text under {' or '.join(names)} (it has {', '.join(record) or 'nothing'}).")


def final_answer(text: str) -> str:
    """What follows GSM8K's marks, without thousands separators; the text itself where there are none."""
    found = _GSM8K.search(text.strip())
    return re.sub(r"(?<=\d),(?=\d{3})", "", found.group(1)) if found else text
