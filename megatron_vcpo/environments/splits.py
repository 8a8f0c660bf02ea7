"""Divide generated tasks into train and eval by their content, so that no seed or index can mix the two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from megatron_vcpo.environments.protocol import EnvironmentSetupError, Split

_EVAL_SHARE = 8  # one task in 8 is held out
_TRIES = 1000


def split_of(content: str) -> Split:
    """The split of a task, by a hash of its content."""
    digest = hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % _EVAL_SHARE == 0 else "train"


def first_in_split[T](split: Split, draw: Callable[[int], T], content: Callable[[T], str], what: str) -> T:
    """The first of draw(0), draw(1), ... that belongs to the split; EnvironmentSetupError if none of many does."""
    for attempt in range(_TRIES):
        task = draw(attempt)
        if split_of(content(task)) == split:
            return task
    raise EnvironmentSetupError(f"{what} has no task in the {split} split: there are too few different ones.")
