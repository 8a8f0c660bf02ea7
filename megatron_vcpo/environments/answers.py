"""Where in a response the answer stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from megatron_vcpo.environments.protocol import EnvironmentSetupError

AnswerFormat = Literal["raw", "first-line", "last-line", "tag", "boxed"]
"""raw: the whole response; first-line, last-line: that line of those not empty, without 'Answer:' before it;
tag: inside the last <answer>...</answer>; boxed: inside the last \\boxed{...}."""

_ANSWER_PREFIX = re.compile(r"^.*\banswer\s*(?:is)?\s*:\s*", re.IGNORECASE)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_BOXED = "\\boxed{"


def check_format(answer_format: str, allowed: Sequence[str] = get_args(AnswerFormat)) -> None:
    """Raise EnvironmentSetupError on a format that does not exist."""
    if answer_format not in allowed:
        raise EnvironmentSetupError(f"answer_format must be one of {', '.join(allowed)}, not {answer_format!r}.")


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings as a tuple. Raises EnvironmentSetupError on anything else."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(string, str) and string for string in strings):
        raise EnvironmentSetupError(f"stop must be a string or a list of strings, none of them empty, not {stop!r}.")
    return strings


def cut(response: str, stop: Sequence[str]) -> str:
    """What stands before the first stop string."""
    ends = [end for string in stop if (end := response.find(string)) >= 0]
    return response[: min(ends)] if ends else response


def extract(response: str, answer_format: AnswerFormat) -> str | None:
    """The answer without white space around it, or None where the response has none in this format.

    Example:
        >>> extract("2 + 2 = 4\\nAnswer: 4\\n", "last-line")
        '4'
    """
    if answer_format == "raw":
        return response.strip()
    if answer_format in ("first-line", "last-line"):
        lines = [line.strip() for line in response.splitlines() if line.strip()]
        return _ANSWER_PREFIX.sub("", lines[0 if answer_format == "first-line" else -1]).strip() if lines else None
    if answer_format == "tag":
        found = _TAG.findall(response)
        return found[-1].strip() if found else None
    return _last_boxed(response)


def _last_boxed(response: str) -> str | None:
    start = response.rfind(_BOXED)
    if start < 0:
        return None
    begin, depth = start + len(_BOXED), 1
    for position in range(begin, len(response)):
        depth += {"{": 1, "}": -1}.get(response[position], 0)
        if depth == 0:
            return response[begin:position].strip()
    return None
