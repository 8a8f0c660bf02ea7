"""PromptSampler: which prompt comes next, identically on every rank and after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vcpo.config import ConfigError
from megatron_vcpo.environments.encoding import encode_prompt
from megatron_vcpo.environments.protocol import Environment, Prompt, draw_prompt, size_of

_MAX_SKIPPED_IN_A_ROW = 1000  # more over-long prompts than this mean that the bound is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPrompt:
    """A prompt with its place in the run."""

    prompt: Prompt
    ids: Sequence[int]  # [P]
    group_id: int  # running number of drawn prompts
    prompt_index: int  # index in the environment


class PromptSampler:
    """Draws prompts in an order fixed by the seed. A finite environment is reshuffled each epoch; no prompt is repeated
    within an epoch."""

    def __init__(self, environment: Environment, tokenizer: Any, *, seed: int, max_length: int, chat: bool) -> None:
        """Args:
        environment: where prompts come from.
        tokenizer: Hugging Face tokenizer.
        seed: of the shuffles.
        max_length: longest prompt, in tokens; longer ones are skipped and counted.
        chat: wrap a prompt as one user message.
        """
        self.environment = environment
        self.tokenizer = tokenizer
        self.seed = seed
        self.max_length = max_length
        self.chat = chat
        self.skipped = 0  # over-long prompts skipped since the start of the run
        self._position = 0  # prompts considered so far, including skipped ones
        self._drawn = 0
        self._epoch = -1
        self._order = np.zeros(0, np.int64)
        self._size = size_of(environment)
        if self._size == 0:
            raise ConfigError("--rollout-environment has no prompts.")

    @property
    def drawn(self) -> int:
        """Number of prompts drawn since the start of the run, which is also the number of the next one."""
        return self._drawn

    def draw(self, count: int) -> list[DrawnPrompt]:
        """The next `count` prompts.

        Raises:
            ConfigError: (almost) no prompt is short enough.
            EnvironmentSetupError: a prompt that cannot be tokenized.
        """
        out: list[DrawnPrompt] = []
        in_a_row = 0
        while len(out) < count:
            index = self._index(self._position)
            self._position += 1
            prompt, ids = encode_prompt(self.tokenizer, draw_prompt(self.environment, index), chat=self.chat)
            if not 0 < len(ids) <= self.max_length:
                self.skipped += 1
                in_a_row += 1
                if in_a_row >= min(_MAX_SKIPPED_IN_A_ROW, self._size or _MAX_SKIPPED_IN_A_ROW):
                    raise ConfigError(
                        f"{in_a_row} prompts in a row are empty or longer than --rollout-max-prompt-length "
                        f"{self.max_length} (the last has {len(ids)} tokens); raise it."
                    )
                continue
            in_a_row = 0
            out.append(DrawnPrompt(prompt=prompt, ids=ids, group_id=self._drawn, prompt_index=index))
            self._drawn += 1
        return out

    def _index(self, position: int) -> int:
        if self._size is None:
            return position
        epoch, place = divmod(position, self._size)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self._size)
            self._epoch = epoch
        return int(self._order[place])

    def state_dict(self) -> dict[str, int]:
        """The cursor, and what it needs to mean the same prompts again (a size of -1: unlimited)."""
        return {
            "position": self._position,
            "drawn": self._drawn,
            "skipped": self.skipped,
            "seed": self.seed,
            "size": -1 if self._size is None else self._size,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved cursor.

        Raises:
            ConfigError: seed or number of prompts differ, so that some prompts would be repeated and others left out.
        """
        own = self.state_dict()
        for name, flag in (("seed", "--rollout-seed"), ("size", "--rollout-prompts")):
            if int(state[name]) != own[name]:
                raise ConfigError(
                    f"The saved run drew its prompts with {name} {int(state[name])}, this one has {own[name]}: the "
                    f"order would not continue; restore {flag}, or add --finetune to start a new run from its weights."
                )
        self._position, self._drawn, self.skipped = (int(state[k]) for k in ("position", "drawn", "skipped"))
