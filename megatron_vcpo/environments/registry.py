"""make_environment: an environment from its name."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from megatron_vcpo.environments.protocol import Environment, EnvironmentSetupError, Split

_BUILT_IN = ("jsonl", "sort_digits", "reasoning_gym:<data set>")


def make_environment(
    name: str, *, split: Split, seed: int, config: dict[str, Any], prompts_file: str | None = None
) -> Environment:
    """Build an environment.

    Args:
        name: 'reasoning_gym:<data set>', 'jsonl', 'sort_digits', or 'module:Class' of your own.
        split: train or eval.
        seed: of generated tasks.
        config: keyword arguments of the environment.
        prompts_file: for 'jsonl'.

    Raises:
        EnvironmentSetupError: unknown name, import that fails, or arguments the environment does not take.
    """
    kind, _, rest = name.partition(":")
    arguments = {"split": split, "seed": seed, **config}
    try:
        if kind == "reasoning_gym" and rest:
            from megatron_vcpo.environments.reasoning_gym_env import ReasoningGymEnvironment

            return ReasoningGymEnvironment(rest, **arguments)
        if name == "jsonl":
            from megatron_vcpo.environments.jsonl_math import JsonlMathEnvironment

            return JsonlMathEnvironment(path=str(prompts_file), **arguments)
        if name == "sort_digits":
            from megatron_vcpo.environments.sort_digits import SortDigitsEnvironment

            return SortDigitsEnvironment(**arguments)
        return _own_class(name, kind, rest)(**arguments)
    except TypeError as error:
        raise EnvironmentSetupError(
            f"--rollout-environment {name} does not take these settings (--rollout-environment-config): {error}."
        ) from error


def _own_class(name: str, module_name: str, class_name: str) -> Any:
    if not class_name:
        close = difflib.get_close_matches(name, ["jsonl", "sort_digits", "reasoning_gym"], 1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise EnvironmentSetupError(
            f"There is no environment {name!r} (built in: {', '.join(_BUILT_IN)}; your own as 'module:Class'){hint}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EnvironmentSetupError(f"--rollout-environment {name}: cannot import {module_name!r} ({error}).") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise EnvironmentSetupError(f"--rollout-environment {name}: {module_name} has no class {class_name!r}.")
    return found
