"""Questions from a JSONL file, answers judged by math-verify. Reads GSM8K without changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from megatron_vcpo.environments import answers, math_answers
from megatron_vcpo.environments.answers import AnswerFormat
from megatron_vcpo.environments.protocol import EnvironmentSetupError, Prompt, Split
from megatron_vcpo.environments.questions import read_questions
from megatron_vcpo.environments.reasoning import MARKERS, Markers, ResponseReader

_FORMATS = ("math", *get_args(AnswerFormat))


class JsonlMath:
    """A file with one JSON object a line, each with a question (or prompt, problem) and an answer (or solution).

    If the file's answer contains '####', as in GSM8K, only the part after the last '####' counts; if it contains
    \\boxed{...}, only the last box. Configuration: `prompt_template` with {question}; `stop`, strings that end the
    response; `reasoning`, markers of blocks that are not judged; `answer_format`: math (default: after '####' if there
    is an answer, else the last box, else where math-verify finds it), or one of `AnswerFormat`.
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
        reasoning: Markers = MARKERS,
    ) -> None:
        answers.check_format(answer_format, _FORMATS)
        if "{question}" not in prompt_template:
            raise EnvironmentSetupError("prompt_template of jsonl must contain {question}.")
        self._template = prompt_template
        self._format = answer_format
        self._reader = ResponseReader(stop=stop, reasoning=reasoning)
        self._rows = read_questions(Path(path))
        math_answers.prepare()

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, index: int) -> Prompt:
        """The question on the index-th non-empty line; after the last line it starts over."""
        question, answer = self._rows[index % len(self._rows)]
        return Prompt(text=self._template.replace("{question}", question), answer=answer)

    def reward(self, prompt: Prompt, response: str) -> float:
        """1.0 if the response's answer equals the file's mathematically, else 0.0."""
        judged = self._reader.read(prompt, response)
        answer = judged if judged is None or self._format == "math" else answers.extract(judged, self._format)  # type: ignore[arg-type]
        if answer is None:
            return 0.0
        if answer.strip() == prompt.answer:
            return 1.0
        words = math_answers.words_of(prompt.answer)
        if words is not None:
            return float(math_answers.says(answer, words))
        find = math_answers.given_answer if self._format == "math" else math_answers.whole_answer
        given = find(answer)
        return 0.0 if given is None else float(math_answers.is_equal(prompt.answer, given))
