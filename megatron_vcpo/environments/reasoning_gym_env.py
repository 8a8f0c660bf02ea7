"""Any task of the reasoning-gym library, by name and configuration."""

from __future__ import annotations

import difflib
from typing import Any

from megatron_vcpo.environments.answers import FORMATS, AnswerFormat, extract_answer
from megatron_vcpo.environments.protocol import EnvironmentSetupError, Prompt, Split
from megatron_vcpo.environments.splits import generate


class ReasoningGymEnvironment:
    """Questions and rewards of one reasoning-gym data set; training and held-out questions are disjoint."""

    def __init__(
        self,
        dataset: str,
        *,
        split: Split,
        seed: int,
        prompt_template: str = "{question}",
        question_key: str = "question",
        answer_format: AnswerFormat = "raw",
        **dataset_config: Any,
    ) -> None:
        r"""Build the data set.

        Args:
            dataset: its name in reasoning-gym.
            split: train or eval.
            seed: of the generator.
            prompt_template: text around the question, '{question}' in it; examples for few-shot prompts go here.
            question_key: 'question', or a key of the entry's metadata ('expression', for a bare sum).
            answer_format: where the answer stands in a response: raw, first-line, last-line, tag (<answer>) or boxed.
            dataset_config: the data set's own settings.

        Raises:
            EnvironmentSetupError: unknown data set or setting, or a template without '{question}'.
        """
        if answer_format not in FORMATS:
            raise EnvironmentSetupError(f"answer_format must be one of {', '.join(FORMATS)}, not {answer_format!r}.")
        if "{question}" not in prompt_template:
            raise EnvironmentSetupError("prompt_template must contain '{question}'.")
        self._dataset = _create(dataset, dataset_config, seed)
        self._split = split
        self._template = prompt_template
        self._question_key = question_key
        self._format = answer_format
        self._question(self._dataset[0])

    def _question(self, entry: dict[str, Any]) -> str:
        if self._question_key == "question":
            return str(entry["question"])
        try:
            return str(entry["metadata"][self._question_key])
        except KeyError:
            keys = ", ".join(sorted(entry["metadata"]))
            raise EnvironmentSetupError(
                f"question_key {self._question_key!r} is not in this data set's metadata ({keys})."
            ) from None

    def prompt(self, index: int) -> Prompt:
        """The index-th question of the split."""
        entry = generate(index, self._split, self._dataset.__getitem__, self._question)
        text = self._template.replace("{question}", self._question(entry))
        return Prompt(text=text, answer=str(entry["answer"]), metadata={"entry": entry})

    def reward(self, prompt: Prompt, response: str) -> float:
        """The data set's own score of the extracted answer; 0 where there is none."""
        answer = extract_answer(response, self._format)
        return float(self._dataset.score_answer(answer, prompt.metadata["entry"]))


def _create(name: str, config: dict[str, Any], seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, 3) or sorted(DATASETS)[:3]
        raise EnvironmentSetupError(f"reasoning-gym has no data set {name!r}; did you mean {' or '.join(close)}?")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise EnvironmentSetupError(f"reasoning-gym refuses this configuration of {name!r}: {error}.") from error
