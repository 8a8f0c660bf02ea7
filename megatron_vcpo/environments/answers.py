"""Find the answer in a response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_vcpo.environments.protocol import EnvironmentSetupError

AnswerFormat = Literal["raw", "first-line", "last-line", "tag", "boxed"]
"""raw: the whole response; first-line, last-line: that non-empty line, without 'Answer:' before it;
tag: inside the last <answer>...</answer>; boxed: inside the last \\boxed{...} or \\fbox{...} that is not empty."""

_ANSWER_PREFIX = re.compile(r"^.*\banswer\s*(?:is)?\s*:\s*", re.IGNORECASE)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_TAG_BEGIN = re.compile("<answer>", re.IGNORECASE)
_BOX_OR_BRACE = re.compile(r"(?P<begin>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)  # \{ is text


def check_format(answer_format: str, allowed: Sequence[str] = get_args(AnswerFormat)) -> None:
    """Raise EnvironmentSetupError if the format is not one of `allowed`."""
    if answer_format not in allowed:
        raise EnvironmentSetupError(f"answer_format must be one of {', '.join(allowed)}, not {answer_format!r}.")


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings as a tuple. Raises EnvironmentSetupError if `stop` is not one string or several."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(string, str) and string for string in strings):
        raise EnvironmentSetupError(f"stop must be a string or a list of strings, none of them empty, not {stop!r}.")
    return strings


def extract(response: str, answer_format: AnswerFormat) -> str | None:
    """The answer without surrounding white space, or None if the response has none in this format.

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
        # A second <answer> inside the match means that the first was never closed.
        return _TAG_BEGIN.split(found[-1])[-1].strip() if found else None
    found = boxes(response)
    return found[-1].content if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One \\boxed{...} or \\fbox{...} of a text."""

    content: str | None  # without surrounding white space; None if the box is never closed
    start: int
    end: int


def boxes(text: str) -> list[Box]:
    """The outermost boxes that are not empty, in order; if a box holds nothing but another box, the inner one."""
    found: list[Box] = []
    open_groups: list[re.Match[str]] = []
    for token in _BOX_OR_BRACE.finditer(text):
        if token["begin"] is not None or token[0] == "{":
            open_groups.append(token)
        elif token[0] == "}" and open_groups:
            begin = open_groups.pop()
            content = text[begin.end() : token.start()].strip()
            if begin["begin"] is not None and content:
                inner = found.pop() if found and found[-1].start > begin.start() else None
                while found and found[-1].start > begin.start():
                    found.pop()
                alone = inner is not None and text[inner.start : inner.end] == content
                found.append(
                    Box(content=inner.content if inner and alone else content, start=begin.start(), end=token.end())
                )
    endless = [Box(content=None, start=group.start(), end=len(text)) for group in open_groups if group["begin"]]
    return sorted([*found, *endless], key=lambda box: box.start)
