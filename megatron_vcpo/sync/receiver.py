"""WeightReceiver: what weights are published to, and all that `sync/` knows about an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """How one set of weights arrived."""

    copied: int = 0  # tensors written directly into the receiver's memory
    reloaded: int = 0  # tensors that went through the receiver's own loader
    received: dict[str, int] | None = None  # digest of each tensor as it arrived, if the update was verified
    unreadable: tuple[str, ...] = ()  # tensors that a verified update could not read back


class WeightReceiver(Protocol):
    """Holds one set of weights of a known version.

    All ranks of the receiver call every method, in the same order. Methods leave the trainer's RNG, thread count and
    default dtype unchanged.
    """

    version: int | None
    """Policy version of the weights it holds; None until a complete set has arrived."""

    float32_weights: frozenset[str]
    """Hugging Face names of parameters that it holds, and must be sent, in float32, whatever its dtype."""

    def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], version: int, *, verify: bool = False
    ) -> UpdateReport:
        """Replace all weights by the named tensors (Hugging Face names, full shapes) and drop everything computed with
        the old weights.

        With `verify`, overwrite the old values with garbage first, and compare what the receiver then holds with what
        arrived. The producer may reuse a tensor's memory as soon as the next one is asked for. Any error leaves
        `version` None.
        """
