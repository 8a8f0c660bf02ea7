"""The protocol of an environment: a prompt in, a reward out."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Split = Literal["train", "eval"]


class EnvironmentSetupError(ValueError):
    """The environment cannot be built or its data cannot be read; one sentence, with file and line if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question and what is needed to judge an answer to it. Must be picklable: rewards run in other processes."""

    text: str
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rendered: str | None = None
    """The text that a chat template made of `text`; set before `reward` sees the prompt. None without a template."""


class Environment(Protocol):
    """Two methods, and a third, `__len__`, if the number of prompts is finite.

    A class is built as `Class(split="train" | "eval", seed=int, **environment_config)`, once in the trainer (for
    prompts) and once in every reward process (for rewards).
    """

    def prompt(self, index: int) -> Prompt:
        """The index-th prompt; the same index gives the same prompt in every process and run."""

    def reward(self, prompt: Prompt, response: str) -> float | Mapping[str, float]:
        """Judge one response. In a mapping of named parts, the key 'reward' holds the reward."""


def draw_prompt(environment: Environment, index: int) -> Prompt:
    """environment.prompt(index), checked to be a Prompt whose text can be tokenized.

    Raises:
        EnvironmentSetupError: it is not; names the environment's class and the index.
    """
    prompt = environment.prompt(index)
    where = f"prompt({index}) of the environment {type(environment).__name__}"
    if not isinstance(prompt, Prompt):
        raise EnvironmentSetupError(f"{where} is no Prompt but a {type(prompt).__name__}.")
    if not isinstance(prompt.text, str) or not prompt.text:
        raise EnvironmentSetupError(f"{where} has no text.")
    require_unicode(prompt.text, f"The text of {where}")
    return prompt


def require_unicode(text: str, what: str) -> None:
    """Raise EnvironmentSetupError if a text holds half a surrogate pair, which neither tokenizers nor files accept."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentSetupError(
            f"{what} holds a lone surrogate (\\u{ord(text[error.start]):04x} at character {error.start}), which is "
            "half a character and cannot be written as UTF-8."
        ) from error


def size_of(environment: Environment) -> int | None:
    """Number of prompts; None if it is unlimited."""
    return len(environment) if isinstance(environment, Sized) else None
