"""Build an environment from its name or import path."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from megatron_vcpo.environments.protocol import Environment, EnvironmentSetupError, Split

_BUILTIN = {"sort_digits": ("megatron_vcpo.environments.sort_digits", "SortDigits")}
_NAMES = ("reasoning_gym:<dataset>", "jsonl", *(f"builtin:{name}" for name in _BUILTIN), "module:Class")


def make_environment(
    spec: str, split: Split, seed: int, config: Mapping[str, Any], prompts_file: str | None = None
) -> Environment:
    """Build 'reasoning_gym:<dataset>', 'jsonl', 'builtin:<task>' (or just '<task>'), or 'module:Class'.

    Raises EnvironmentSetupError: one sentence on what is wrong with the name, the configuration or the data.
    """
    kind, _, name = spec.partition(":")
    reserved = sorted({"split", "seed", "path", "dataset"} & config.keys())
    if reserved:
        raise EnvironmentSetupError(
            f"--rollout-environment-config must not hold {', '.join(map(repr, reserved))}: these come from other flags "
            "(--rollout-seed, --rollout-prompts, --rollout-environment)."
        )
    arguments = {**config, "split": split, "seed": seed}
    if kind == "jsonl":
        if prompts_file is None:
            flag = "--rollout-prompts" if split == "train" else "--rollout-eval-prompts"
            raise EnvironmentSetupError(f"Environment jsonl needs {flag}, a file of questions for the {split} split.")
        return _construct(
            "megatron_vcpo.environments.jsonl_math", "JsonlMath", spec, {**arguments, "path": prompts_file}
        )
    if prompts_file is not None:
        raise EnvironmentSetupError(
            f"Environment {spec} reads no prompt file; remove it or use --rollout-environment jsonl."
        )
    if kind == "reasoning_gym" and name:
        module = "megatron_vcpo.environments.reasoning_gym_env"
        return _construct(module, "ReasoningGym", spec, {**arguments, "dataset": name})
    task = name if kind == "builtin" else spec
    if task in _BUILTIN:
        return _construct(*_BUILTIN[task], spec, arguments)
    if name and kind not in ("builtin", "reasoning_gym"):
        return _construct(kind, name, spec, arguments)
    raise EnvironmentSetupError(_unknown(spec))


def _unknown(spec: str) -> str:
    known = ["jsonl", "reasoning_gym", *(f"builtin:{task}" for task in _BUILTIN)]
    close = difflib.get_close_matches(spec, [*known, *_BUILTIN], n=1)
    hint = f" Did you mean {close[0]}?" if close and close[0] != spec else ""
    return f"There is no environment {spec!r}; there are {', '.join(_NAMES)}.{hint}"


def _construct(module_name: str, class_name: str, spec: str, arguments: Mapping[str, Any]) -> Environment:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise EnvironmentSetupError(f"{_unknown(spec)} (No module {error.name!r} on the Python path.)") from error
        raise EnvironmentSetupError(f"Environment {spec} cannot be imported: {error}.") from error
    except Exception as error:
        raise EnvironmentSetupError(
            f"Environment {spec} cannot be imported: {type(error).__name__}: {error}."
        ) from error
    cls = getattr(module, class_name, None)
    if cls is None:
        close = difflib.get_close_matches(class_name, dir(module), n=1)
        hint = f" Did you mean {module_name}:{close[0]}?" if close else ""
        raise EnvironmentSetupError(f"Module {module_name} has no {class_name!r}.{hint}")
    try:
        environment = cls(**arguments)
    except EnvironmentSetupError:
        raise
    except Exception as error:
        raise EnvironmentSetupError(
            f"Environment {spec} cannot be built from its configuration: {type(error).__name__}: {error}."
        ) from error
    for method in ("prompt", "reward"):
        if not callable(getattr(environment, method, None)):
            raise EnvironmentSetupError(f"Environment {spec} has no method {method}().")
    return environment
