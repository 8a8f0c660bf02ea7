"""Any dataset of the reasoning-gym package: generated tasks with verifiable answers, no data files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_vcpo.environments import answers, splits
from megatron_vcpo.environments.answers import AnswerFormat
from megatron_vcpo.environments.protocol import EnvironmentSetupError, Prompt, Split
from megatron_vcpo.environments.reasoning import MARKERS, Markers, ResponseReader

_SIZE = 10_000  # for datasets that prepare all tasks in advance; others ignore it
_LARGEST_SIZE = 10_000_000
_STRIDE = 16_777_213  # a prime, so that candidates for one prompt are far from its neighbours' candidates
_FIELD = re.compile(r"\{(\w+)\}")


class ReasoningGym:
    """Unlimited prompts; the dataset's own `score_answer` is the reward.

    Configuration: `prompt_template` with {question} or any field of the task's metadata in braces (chain_sum has
    {expression}); `answer_format`; `stop`, strings that end the answer; `reasoning`, markers of blocks that are not
    judged; everything else is passed to the dataset.

    Example:
        >>> ReasoningGym(dataset="chain_sum", split="train", seed=1, max_terms=2, stop="\\n",
        ...              prompt_template="3 + 4 = 7\\n25 + 11 = 36\\n{expression} =")
    """

    def __init__(
        self,
        *,
        dataset: str,
        split: Split,
        seed: int,
        prompt_template: str = "{question}",
        answer_format: AnswerFormat = "raw",
        stop: str | Sequence[str] = (),
        reasoning: Markers = MARKERS,
        **config: Any,
    ) -> None:
        answers.check_format(answer_format)
        self._name = f"reasoning_gym:{dataset}"
        self._split = split
        self._template = prompt_template
        self._format = answer_format
        self._reader = ResponseReader(stop=stop, reasoning=reasoning)
        self._dataset = _create(dataset, {"size": _SIZE, **config, "seed": seed % (1 << 24)}, config)
        self._period: int | None = None
        self._ready = False

    def prompt(self, index: int) -> Prompt:
        """See `Environment.prompt`."""
        if not self._ready:
            self._prepare()

        def draw(attempt: int) -> dict[str, Any]:
            candidate = index + attempt * _STRIDE
            return self._dataset[candidate if self._period is None else candidate % self._period]

        entry = splits.first_in_split(self._split, draw, lambda task: str(task["question"]), self._name)
        return Prompt(text=self._text(entry), answer=entry["answer"], metadata=entry)

    def reward(self, prompt: Prompt, response: str) -> float:
        """See `Environment.reward`. A response without an answer in the configured format gets 0."""
        judged = self._reader.read(prompt, response)
        answer = None if judged is None else answers.extract(judged, self._format)
        if answer is None:
            return 0.0
        entry = dict(prompt.metadata)
        try:
            return float(self._dataset.score_answer(answer, entry))
        except Exception:  # noqa: BLE001 - raised again below if the answer is not to blame
            # Some datasets parse the answer without catching errors. If the right answer passes, the given one is to
            # blame.
            self._dataset.score_answer(entry["answer"], entry)
            return 0.0

    def _prepare(self) -> None:
        """Runs at the first prompt, so that reward processes, which need no prompts, generate none."""
        try:
            self._dataset[_STRIDE]
        except IndexError:
            self._period = len(self._dataset)
        known = _fields(self._dataset[0])
        used = set(_FIELD.findall(self._template))
        if not used & known.keys():
            raise EnvironmentSetupError(
                f"prompt_template of {self._name} must contain one of "
                f"{', '.join('{' + name + '}' for name in known)}; it is {self._template!r}."
            )
        self._ready = True

    def _text(self, entry: Mapping[str, Any]) -> str:
        fields = _fields(entry)
        # Other braces stay unchanged: few-shot examples may contain JSON or LaTeX.
        return _FIELD.sub(lambda match: fields.get(match[1], match[0]), self._template)


def _fields(entry: Mapping[str, Any]) -> dict[str, str]:
    extra = {k: str(v) for k, v in entry["metadata"].items() if isinstance(v, str | int | float)}
    return extra | {"question": str(entry["question"])}


def _create(dataset: str, settings: dict[str, Any], given: Mapping[str, Any]) -> Any:
    size = settings["size"]
    if not isinstance(size, int) or not 1 <= size <= _LARGEST_SIZE:
        raise EnvironmentSetupError(
            f"size of reasoning_gym:{dataset} must be a whole number from 1 to {_LARGEST_SIZE}, not {size!r}."
        )
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise EnvironmentSetupError(
            f"reasoning_gym:{dataset} needs the package reasoning-gym, which cannot be imported: {error}."
        ) from error
    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {len(DATASETS)} others."
        raise EnvironmentSetupError(f"reasoning-gym has no dataset {dataset!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(dataset, **settings)
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise EnvironmentSetupError(
            f"reasoning-gym dataset {dataset!r} does not accept the configuration {dict(given)}: {error}."
        ) from error
