"""The sources of a run's prompts and rewards, opened and checked before anything expensive."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron_vcpo.checkpoint.model_files import ModelFiles
from megatron_vcpo.config import ConfigError, PluginConfig
from megatron_vcpo.environments import Environment
from megatron_vcpo.environments.questions import strict_json
from megatron_vcpo.rollout.decode import ResponseDecoder

_SHOWN = 200  # characters of a flag's value shown in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the checks opened, for the run to use."""

    environment: Environment
    eval_environment: Environment | None
    tokenizer: Any
    vocab_size: int  # rows of the embedding that are real tokens
    files: ModelFiles  # what belongs to the model besides its weights, with the run's tokenizer
    decode: ResponseDecoder  # gives the text of a response that is judged


def environment_arguments(config: PluginConfig) -> dict[str, Any]:
    """--rollout-environment-config as keyword arguments."""
    text = config.rollout.environment_config
    shown = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + " ...")
    try:
        parsed = strict_json(text)
    except ValueError as error:
        raise ConfigError(f"--rollout-environment-config is not JSON ({error}): {shown}.") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"--rollout-environment-config must be a JSON object, not {shown}.")
    try:
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ConfigError(
            f"--rollout-environment-config holds a number that is not finite, or text that is not Unicode ({error}): "
            f"{shown}."
        ) from error
    return parsed
