"""The protocol of an environment: a prompt in, a reward out."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Split = Literal["train", "eval"]


class EnvironmentSetupError(ValueError):
    """The environment cannot be built or its data cannot be read; one sentence, with file and line where there is
    one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question and what is needed to judge an answer to it. Must pickle: rewards run in other processes."""

    text: str
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rendered: str | None = None
    """What the model was given, where a chat template made it of `text`; filled in before `reward` sees the prompt."""


class Environment(Protocol):
    """Two methods; a third, `__len__`, where the prompts are finite.

    A class is built as `Class(split="train" | "eval", seed=int, **environment_config)`, once in the trainer (for
    prompts) and once in every reward process (for rewards).
    """

    def prompt(self, index: int) -> Prompt:
        """The index-th prompt; the same index gives the same prompt in every process and run."""

    def reward(self, prompt: Prompt, response: str) -> float | Mapping[str, float]:
        """Judge one response. A mapping holds named parts and its key 'reward' is the reward."""


def draw_prompt(environment: Environment, index: int) -> Prompt:
    """environment.prompt(index), which has to be a Prompt whose text can be tokenized.

    Raises:
        EnvironmentSetupError: it is none; names the environment's class and the index.
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
    """Raise EnvironmentSetupError where a text holds half a surrogate pair, which no tokenizer and no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentSetupError(
            f"{what} holds a lone surrogate (\\u{ord(text[error.start]):04x} at character {error.start}), which is "
            "half a character and cannot be written as UTF-8."
        ) from error


def size_of(environment: Environment) -> int | None:
    """Number of prompts, None where there is no end to them."""
    return len(environment) if isinstance(environment, Sized) else None
