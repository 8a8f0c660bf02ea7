"""Where the answer stands in a response."""

from __future__ import annotations

import re
from typing import Literal, get_args

AnswerFormat = Literal["raw", "first-line", "last-line", "tag", "boxed"]
FORMATS = get_args(AnswerFormat)

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(response: str, where: AnswerFormat) -> str | None:
    r"""The answer's text, stripped; None where the response does not hold one.

    Args:
        response: the decoded response.
        where: 'raw' the whole; 'first-line' and 'last-line' with text; 'tag' the last <answer>...</answer>;
            'boxed' the last \boxed{...}.
    """
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    if where == "raw":
        return response.strip()
    if where == "first-line":
        return lines[0] if lines else None
    if where == "last-line":
        return lines[-1] if lines else None
    if where == "tag":
        found = _TAG.findall(response)
        return found[-1].strip() if found else None
    return _last_boxed(response)


def _last_boxed(response: str) -> str | None:
    start = response.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len(r"\boxed{")
    for place in range(begin, len(response)):
        depth += {"{": 1, "}": -1}.get(response[place], 0)
        if depth == 0:
            return response[begin:place].strip()
    return None
