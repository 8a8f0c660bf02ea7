"""ConfigError, and the checks and bounds that all groups of flags share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

TEMPERATURES = (0.01, 100.0)
LARGEST_FLOAT = 1e30  # sums and products of it are computed in fp32
LARGEST_COUNT = 2**31 - 1  # positions and lengths are int32
LARGEST_LIST = 1 << 20  # of what is held one by one, in lists or processes: far beyond any run, within any memory
LARGEST_PHASE = 1 << 24  # trajectories that exist at one time, some kilobytes each
LARGEST_CACHE = 1 << 42  # bytes
LARGEST_BUCKET = 1 << 36  # bytes
WEEK = 604800.0  # seconds; what waits take beyond it differs from library to library


class ConfigError(ValueError):
    """A setting that cannot work; the message is one sentence that names the flag to change."""


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)


def require_numbers(config: Any, prefix: str, minimum: dict[str, int], maximum: dict[str, int]) -> None:
    """Every float finite, and integers, where they are given, at least and at most so large."""
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), f"--{prefix}-{field.name.replace('_', '-')}"
        if isinstance(value, float):
            require(math.isfinite(value), f"{flag} must be a finite number, not {value}.")
        if isinstance(value, int) and not isinstance(value, bool):
            least, most = minimum.get(field.name), maximum.get(field.name, LARGEST_COUNT)
            require(least is None or value >= least, f"{flag} must be at least {least}, not {value}.")
            shown = str(value) if value < 10**30 else "a number of more than 30 digits"
            require(value <= most, f"{flag} must be at most {most}, not {shown}.")
