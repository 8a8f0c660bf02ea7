"""Find and judge the answer of a mathematical response with math-verify, correcting what it would misread."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from megatron_vcpo.environments.answers import boxes

_MARK = re.compile(r"#{4,}[ \t]*")  # GSM8K's marker of an answer, but also a Markdown heading
_MARKED_LINE = re.compile(r"#{4,}[^\n]*")
_STEP = re.compile(r"[\W_]*(?:step|part|case|section|stage|phase|method|approach|problem|question|example)\b", re.I)
_NUMBERED = re.compile(r"[*_]*\d+[.):]\s+[*_]*[^\W\d_]")  # '2. Final answer'
_LABEL = re.compile(r"^.*?\banswer\b[*_\s]*(?:is\b|:|is\s*:)?[*_\s:]*", re.I)
_NOT_UNITS = "or|and|to|plus|minus|times|over|dozen|hundred|thousand|million|billion|trillion|percent"
_COUNT = re.compile(rf"[*_\s]*([$€£]?-?\d[\d,]*(?:\.\d+)?)\s+(?!(?:{_NOT_UNITS})\b)[^\W\d_][^=]*")  # '4 apples'
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:[,;]|,?\s*\b(?:and|or)\b)[\s$]*")
_FULL_STOP = re.compile(r"(?<=[\w}$)])\.$")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:(?:\\[ ,!]|~|[ \u00a0\u2009\u202f])\d{3})+(?:\.\d+)?")  # 1 200, 1\,200
_MIXED = re.compile(r"(\d+)\s+(\d+)\s*/\s*(\d+)")  # 1 1/2
_STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}|[*_`$\"]|\\[ ,!]")
_MINUS = re.compile(
    r"(^|[:=(,]|\b(?:is|equals)\b)([ \t*_]*)(?:[-\u2212\u2013]|\b(?:minus|negative)\b)"
    r"[ \t]*(?:\\?\$|[€£])?[ \t]*(?=\.?\d)",
    re.I,
)  # - 3, minus 3, -$3
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = "|".join(_SCALES)
_SCALED = re.compile(
    rf"(?<![\w.,/^])(\d+(?:,\d{{3}})*(?:\.\d+)?)(?:\s+({_SCALE})\b|\s*\\(?:text|mathrm)\s*\{{\s*({_SCALE})\s*\}})", re.I
)  # 2.5 million
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,.'’-]+[^\W\d_]+)*")
_SAID = re.compile(r"\banswer\s*(?:is\s*:?|:)(.+)", re.I)


def prepare() -> None:
    """Load math-verify's grammar, so that this does not count against the first reward's deadline."""
    # The reward pool sets the deadline. math-verify's own deadline uses signals, and it warns when that is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _parse("\\boxed{1}")


def given_answer(response: str) -> str | None:
    """The part of a response for math-verify to read: the line after the last '####' that is an answer rather than a
    heading, else the last box, else everything. None if the last box is never closed."""
    found = boxes(response)
    heading_after = False
    for mark in reversed(list(_MARK.finditer(response))):
        line, end = _line_after(response, mark.end())
        line = _spelled(line)
        kind = _kind(line)
        if kind != "heading":
            if not (found and found[-1].start >= end and (heading_after or kind == "prose")):
                return _of_line(line)
            break
        heading_after = True
    if found:
        return last_boxes(response)
    return _spelled(_MARKED_LINE.sub("", response).strip())


def whole_answer(text: str) -> str | None:
    """What math-verify should read if the whole text is the answer; None if it is empty or a box is never closed."""
    if boxes(text):
        return last_boxes(text)
    label = _LABEL.match(text)
    answer = text[label.end() :] if label else text
    return boxed(answer) if answer.strip() else None


def last_boxes(text: str) -> str | None:
    """What math-verify should read of a text with boxes: only `boxed_answer`; None if the last box is never closed."""
    answer = boxed_answer(text)
    return None if answer is None else boxed(answer)


def boxed_answer(text: str) -> str | None:
    """The last box, joined with those before it if only 'and', 'or' or commas are in between; None if one never closes.

    math-verify itself would join all boxes that are not between dollar signs.
    """
    found = boxes(text)
    run = [found.pop()] if found else []
    while found and _BETWEEN_BOXES.fullmatch(text, found[-1].end, run[-1].start):
        run.append(found.pop())
    contents = dict.fromkeys(box.content for box in reversed(run))
    if not contents or None in contents:
        return None
    return ", ".join(str(content) for content in contents)


def boxed(answer: str) -> str:
    """A box around an answer, so that math-verify reads all of it, in a spelling that it knows."""
    answer = _spelled(_FULL_STOP.sub("", answer.strip()))
    if _GROUPED.fullmatch(answer):
        answer = re.sub(r"\\[ ,!]|[^-+\d.]", "", answer)
    if (mixed := _MIXED.fullmatch(answer)) is not None:
        answer = f"{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    return f"\\boxed{{{answer}}}"


def _spelled(text: str) -> str:
    """Rewrite what math-verify would drop: a minus before a number, and the word in '2.5 million'."""
    text = _MINUS.sub(r"\1\2-", text)
    return _SCALED.sub(_in_figures, text)


def _in_figures(match: re.Match[str]) -> str:
    number = Decimal(match[1].replace(",", "")) * _SCALES[(match[2] or match[3]).lower()]
    return f"{number.normalize():f}"


def is_equal(right: str, given: str) -> bool:
    """Whether math-verify gives an answer the same value as the right one."""
    from math_verify import verify

    right = _spelled(right)
    golds = [right]
    if (count := _COUNT.fullmatch(right)) is not None:
        golds.append(count[1])
    read = _parse(given)
    return any(verify(_parse(boxed(gold)), read, timeout_seconds=None) for gold in golds)


def words_of(answer: str) -> str | None:
    """A right answer that consists of words, in lower case and without formatting; None if it is mathematics.

    math-verify reads a word as the product of its letters, so 'Pairs' would equal 'Paris'.
    """
    plain = _plain(answer)
    long_enough = any(len(word) > 3 for word in re.split(r"\W+", plain)) or plain in ("yes", "no")
    return plain if long_enough and "\\" not in plain and _WORDS.fullmatch(plain) else None


def says(response: str, words: str) -> bool:
    """Whether the answer of a response is the same words as `words`, which `words_of` returned."""
    return _plain(_spoken(response)) == words


def _spoken(response: str) -> str:
    found = boxes(response)
    if found:
        return found[-1].content or ""
    marks = list(_MARK.finditer(response))
    if marks:
        line, end = _line_after(response, marks[-1].end())
        label = _LABEL.match(line)
        said = line[label.end() :] if label else line
        return said if said.strip() else _line_after(response, end)[0]
    said_last = list(_SAID.finditer(response))
    return said_last[-1][1] if said_last else response


def _plain(text: str) -> str:
    text = _STYLE.sub(lambda match: match[1] or " " if match[0].startswith("\\") else "", text)
    return " ".join(text.split()).rstrip(".!").strip().casefold()


def _line_after(text: str, position: int) -> tuple[str, int]:
    """The first non-empty line from a position on, and the position of its end."""
    found = re.compile(r"\s*([^\n]*)").match(text, position)
    assert found is not None
    return found[1].strip(), found.end()


def _kind(line: str) -> str:
    """What follows '####': an 'answer', a 'heading' without an answer, or 'prose', which may be either."""
    if boxes(line):
        return "answer"
    if _STEP.match(line) or not _parse(line):
        return "heading"
    label = _LABEL.match(line)
    rest = line[label.end() :] if label else line
    return "prose" if _NUMBERED.match(line) or (re.match(r"[*_]*[^\W\d_]{2}", rest) and "=" not in rest) else "answer"


def _of_line(line: str) -> str | None:
    if boxes(line):
        return last_boxes(line)
    count = _COUNT.fullmatch(line)
    return count[1] if count is not None else line


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)
