"""Reasoning blocks: what a model thinks before it answers is not its answer."""

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
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss; other channels lie between
)
"""How the common models write the begin and the end of a reasoning block."""

Markers = Sequence[Sequence[str]]


def check_markers(markers: Markers) -> tuple[tuple[str, str], ...]:
    """Pairs (begin, end) as tuples. Raises EnvironmentSetupError on anything else."""
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
    """What of a response is judged: nothing within a reasoning block, and nothing from the first stop string on."""

    def __init__(self, *, stop: str | Sequence[str], reasoning: Markers) -> None:
        """Args:
        stop: strings, or one.
        reasoning: pairs (begin, end) of markers; none: everything is judged.

        Raises EnvironmentSetupError on anything else.
        """
        self._stop = check_stop(stop)
        self._markers = check_markers(reasoning)

    def read(self, prompt: Prompt, response: str) -> str | None:
        """The text to be judged; None where the response ends while the model still reasons."""
        inside = open_end(prompt.text if prompt.rendered is None else prompt.rendered, self._markers)
        return judged_part(response, self._markers, self._stop, inside=inside)


def open_end(given: str, markers: Markers) -> str | None:
    """The end marker of the block that a prompt leaves open at its end, as some chat templates do."""
    text = given.rstrip().lower()
    return next((end for begin, end in markers if text.endswith(begin.lower())), None)


def judged_part(response: str, markers: Markers, stop: Sequence[str] = (), *, inside: str | None = None) -> str | None:
    """What stands outside of reasoning blocks and before the first stop string; None where a block does not end.

    Args:
        response: what the model wrote.
        markers: pairs (begin, end), in whatever case.
        stop: strings of which the first outside of a block ends what is judged.
        inside: the end marker of a block that was open before the response began.

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
    """Where the text begins that follows the last end marker whose begin is not in the response: the prompt had it.

    None where a block that the prompt is known to have opened does not end.
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
    """Markers in any case, the longest first, and the stop strings as they are, in the group 'stop'."""
    longest_first = sorted(markers, key=len, reverse=True)
    either = "|".join(re.escape(marker) for marker in longest_first) or "(?!)"
    strings = "|".join(re.escape(string) for string in stop) or "(?!)"
    return re.compile(f"(?P<stop>{strings})|(?i:{either})")
