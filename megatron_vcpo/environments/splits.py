"""Disjoint training and held-out questions for tasks that are generated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from megatron_vcpo.environments.protocol import EnvironmentSetupError, Split

T = TypeVar("T")

_HELD_OUT_SHARE = 8  # one question in so many is held out
_STRIDE = 64  # generator positions of one index; most need only a few
_MAX_TRIES = 4096


def belongs_to(text: str, split: Split) -> bool:
    """Whether a question is of the split: decided by its text alone, so no question is ever in both."""
    held_out = hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % _HELD_OUT_SHARE == 0
    return held_out == (split == "eval")


def generate(index: int, split: Split, make: Callable[[int], T], text_of: Callable[[T], str]) -> T:
    """The index-th item of a split from a generator of items by position.

    Raises:
        EnvironmentSetupError: the generator makes hardly any question of the split.
    """
    for attempt in range(_MAX_TRIES):
        # Positions past an index's own stride are taken from far away, so that neighbours stay independent.
        position = index * _STRIDE + attempt if attempt < _STRIDE else (1 << 40) + index * _MAX_TRIES + attempt
        item = make(position)
        if belongs_to(text_of(item), split):
            return item
    raise EnvironmentSetupError(
        f"The task made no {split} question in {_MAX_TRIES} tries: it has too few different ones; "
        "widen its configuration (--rollout-environment-config)."
    )
