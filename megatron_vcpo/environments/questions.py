"""Read a file of questions and answers, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from megatron_vcpo.environments.math_answers import boxed_answer
from megatron_vcpo.environments.protocol import EnvironmentSetupError, require_unicode

_QUESTION_KEYS = ("question", "prompt", "problem")
_ANSWER_KEYS = ("answer", "solution")
_GSM8K = "####"  # the answer follows it
_LARGEST_EXPONENT = 300  # of numbers, which are written out in full


def read_questions(path: Path) -> list[tuple[str, str]]:
    """(question, answer) of every non-empty line. Raises EnvironmentSetupError with file and line number."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise EnvironmentSetupError(
                f"The prompt file {path} is a pipe or a device, and every reward process has to read it; name a file."
            )
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EnvironmentSetupError(f"The prompt file {path} cannot be read: {error.strerror or error}.") from error
    rows = [_row(line, f"{path} line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise EnvironmentSetupError(f"The prompt file {path} holds no questions.")
    return rows


def strict_json(text: str, *, parse_float: Callable[[str], Any] = float) -> Any:
    """json.loads, except that a duplicate key in an object is an error.

    Raises:
        ValueError: not JSON, a duplicate key, or nested too deeply; the message is a clause without a full stop.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_float=parse_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return record


def _row(line: bytes, where: str) -> tuple[str, str]:
    try:
        record = strict_json(line.decode("utf-8-sig"), parse_float=Decimal)
    except UnicodeDecodeError as error:
        raise EnvironmentSetupError(
            f"{where} is not UTF-8 text (byte 0x{line[error.start]:02x} at position {error.start}); save the file as "
            "UTF-8."
        ) from error
    except ValueError as error:
        raise EnvironmentSetupError(f"{where} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise EnvironmentSetupError(f"{where} is not a JSON object.")
    question = _field(record, _QUESTION_KEYS, where)
    answer = _field(record, _ANSWER_KEYS, where)
    if _GSM8K in answer:
        answer = answer.rsplit(_GSM8K, 1)[1]
    else:
        answer = boxed_answer(answer) or answer
    if not answer.strip():
        raise EnvironmentSetupError(f"{where} has an empty answer.")
    return question, answer.strip()


def _field(record: dict[str, Any], keys: Sequence[str], where: str) -> str:
    for key in keys:
        text = _text(record.get(key))
        if text.strip():
            require_unicode(text, f"{where}: {key!r}")
            return text
    present = [key for key in keys if key in record]
    if present:
        raise EnvironmentSetupError(f"{where}: {present[0]!r} must be text that is not empty (or a finite number).")
    raise EnvironmentSetupError(f"{where} has none of the keys {', '.join(map(repr, keys))}.")


def _text(value: Any) -> str:
    """Text unchanged, a number written out, '' for anything else (tables have NaN in empty cells)."""
    if isinstance(value, Decimal):
        return f"{value:f}" if value.is_finite() and abs(value.adjusted()) <= _LARGEST_EXPONENT else ""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
