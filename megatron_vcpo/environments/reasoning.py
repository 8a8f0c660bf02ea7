"""Reasoning blocks: what a model thinks before it answers is not part of its answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_vcpo.environments.answers import check_stop
from megatron_vcpo.environments.protocol import EnvironmentSetupError, Prompt

MARKERS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM-4.5, Nemotron, OLMo 3, MiniMax M2
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("<ifm|think>", "</ifm|think>"),  # K2 Horizon
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # Sky-T1, OpenThinker
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|channel>", "<channel|>"),  # Gemma 4
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss; others may lie between
)
"""How common models mark the begin and the end of a reasoning block."""

Markers = Sequence[Sequence[str]]


def check_markers(markers: Markers) -> tuple[tuple[str, str], ...]:
    """The pairs (begin, end) as tuples. Raises EnvironmentSetupError if `markers` are not such pairs."""
    pairs = [tuple(pair) if isinstance(pair, list | tuple) else () for pair in _items(markers)]
    if not all(len(pair) == 2 and all(isinstance(m, str) and m.strip() for m in pair) for pair in pairs):
        raise EnvironmentSetupError(
            "reasoning must be a list of pairs, the begin and the end of a reasoning block "
            f'([["<think>", "</think>"]]; [] has all judged), not {markers!r}.'
        )
    return tuple((str(begin), str(end)) for begin, end in pairs)


def _items(markers: Markers) -> list[Sequence[str]]:
    return list(markers) if isinstance(markers, list | tuple) else [()]


class ResponseReader:
    """Picks the part of a response to judge: outside of reasoning blocks and before the first stop string."""

    def __init__(self, *, stop: str | Sequence[str], reasoning: Markers) -> None:
        """Args:
        stop: strings, or one.
        reasoning: pairs (begin, end) of markers; with no pairs, everything is judged.

        Raises EnvironmentSetupError if one of them is malformed.
        """
        self._stop = check_stop(stop)
        self._markers = check_markers(reasoning)

    def read(self, prompt: Prompt, response: str) -> str | None:
        """The text to judge; None if the response ends inside a reasoning block."""
        inside = open_end(prompt.text if prompt.rendered is None else prompt.rendered, self._markers)
        return judged_part(response, self._markers, self._stop, inside=inside)


def open_end(given: str, markers: Markers) -> str | None:
    """The end marker of the block that the prompt leaves open at its end, as some chat templates do; else None."""
    text = given.rstrip().lower()
    return next((end for begin, end in markers if text.endswith(begin.lower())), None)


def judged_part(response: str, markers: Markers, stop: Sequence[str] = (), *, inside: str | None = None) -> str | None:
    """The text outside of reasoning blocks and before the first stop string; None if a block does not end.

    Args:
        response: what the model wrote.
        markers: pairs (begin, end); upper and lower case are the same.
        stop: strings; the first one outside of a block ends the judged text.
        inside: end marker of a block that was open before the response began.

    Example:
        >>> judged_part("<think>9 or 10?</think> 10", MARKERS)
        ' 10'
    """
    ends = {begin.lower(): end.lower() for begin, end in markers}
    start = _after_unbegun(response, ends, inside and inside.lower())
    if start is None:
        return None
    parts: list[str] = []
    pattern = _any_of(ends, stop)
    while (found := pattern.search(response, start)) is not None:
        parts.append(response[start : found.start()])
        if found["stop"] is not None:
            return " ".join(parts)
        end = _any_of([ends[found[0].lower()]]).search(response, found.end())
        if end is None:
            return None
        start = end.end()
    return " ".join([*parts, response[start:]])


def _after_unbegun(response: str, ends: Mapping[str, str], inside: str | None) -> int | None:
    """Position after the last end marker whose begin marker is not in the response, but was in the prompt.

    None if the prompt is known to have opened a block (`inside`) and it does not end.
    """
    position = None if inside is not None else 0
    for found in _any_of([*ends, *ends.values()]).finditer(response):
        marker = found[0].lower()
        if inside is not None:
            if marker == inside:
                inside = None
                position = found.end() if position is None else position
        elif marker in ends:
            inside = ends[marker]
        else:
            position = found.end()
    return position


def _any_of(markers: Iterable[str], stop: Sequence[str] = ()) -> re.Pattern[str]:
    """A pattern for the markers in any case, longest first, and for the exact stop strings, in the group 'stop'."""
    longest_first = sorted(markers, key=len, reverse=True)
    either = "|".join(re.escape(marker) for marker in longest_first) or "(?!)"
    strings = "|".join(re.escape(string) for string in stop) or "(?!)"
    return re.compile(f"(?P<stop>{strings})|(?i:{either})")
