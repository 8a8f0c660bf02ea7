"""A toy task for small models: write the digits of a number in ascending order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_vcpo.environments import splits
from megatron_vcpo.environments.protocol import EnvironmentSetupError, Prompt, Split
from megatron_vcpo.environments.reasoning import MARKERS, Markers, ResponseReader


class SortDigits:
    """Unlimited prompts such as 'sort 31752: ', answered by '12357'. Supervised warm-up uses `prompt(i).answer`.

    Configuration: n_digits; prompt_template, with {digits}; partial_credit: reward the share of digits in their right
    place, instead of 1 for all and else 0; stop, strings that end the answer; reasoning, markers of blocks that are not
    judged.
    """

    def __init__(
        self,
        *,
        split: Split,
        seed: int,
        n_digits: int = 5,
        prompt_template: str = "sort {digits}: ",
        partial_credit: bool = False,
        stop: str | Sequence[str] = "\n",
        reasoning: Markers = MARKERS,
    ) -> None:
        if not isinstance(n_digits, int) or not 2 <= n_digits <= 1000:
            raise EnvironmentSetupError(
                f"n_digits of builtin:sort_digits must be a whole number from 2 to 1000, not {n_digits!r}."
            )
        if "{digits}" not in prompt_template:
            raise EnvironmentSetupError("prompt_template of builtin:sort_digits must contain {digits}.")
        self._split = split
        self._seed = seed
        self._n_digits = n_digits
        self._template = prompt_template
        self._partial_credit = partial_credit
        self._reader = ResponseReader(stop=stop, reasoning=reasoning)

    def prompt(self, index: int) -> Prompt:
        """See `Environment.prompt`."""

        def draw(attempt: int) -> str:
            return "".join(random.Random(f"{self._seed}/{index}/{attempt}").choices("0123456789", k=self._n_digits))

        digits = splits.first_in_split(self._split, draw, lambda task: task, "builtin:sort_digits")
        return Prompt(
            text=self._template.replace("{digits}", digits), answer="".join(sorted(digits)), metadata={"digits": digits}
        )

    def reward(self, prompt: Prompt, response: str) -> float:
        """See `Environment.reward`."""
        given, right = (self._reader.read(prompt, response) or "").strip(), prompt.answer
        if not self._partial_credit:
            return float(given == right)
        return sum(a == b for a, b in zip(given, right, strict=False)) / max(len(given), len(right))
