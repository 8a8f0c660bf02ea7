"""A task that a small model learns from scratch within minutes: sort the digits of a number."""

from __future__ import annotations

import numpy as np

from megatron_vcpo.environments.protocol import EnvironmentSetupError, Prompt, Split
from megatron_vcpo.environments.splits import generate


class SortDigitsEnvironment:
    """'31752:' asks for '12357'. The reward is 1 for exactly that."""

    def __init__(self, *, split: Split, seed: int, digits: int = 8) -> None:
        """Args: digits: how many there are to sort, 2 to 64."""
        if not 2 <= digits <= 64:
            raise EnvironmentSetupError(f"sort_digits needs 2 to 64 digits, not {digits}.")
        self._split = split
        self._seed = seed
        self._digits = digits

    def prompt(self, index: int) -> Prompt:
        """The index-th number of the split."""
        number = generate(index, self._split, self._number, str)
        return Prompt(text=f"{number}:", answer="".join(sorted(number)))

    def _number(self, position: int) -> str:
        drawn = np.random.default_rng([self._seed, position]).integers(0, 10, self._digits)
        return "".join(map(str, drawn))

    def reward(self, prompt: Prompt, response: str) -> float:
        """1 for the sorted digits and nothing else."""
        return float(response.strip() == prompt.answer)
