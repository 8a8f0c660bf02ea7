"""WeightReceiver: what weights are published to. `sync/` knows of an engine no more than this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """How one set of weights arrived."""

    copied: int = 0  # tensors written straight into the receiver's memory
    reloaded: int = 0  # tensors that went through the receiver's own loader
    received: dict[str, int] | None = None  # digest of each tensor as it arrived, of a verified update
    unreadable: tuple[str, ...] = ()  # tensors that a verified update could not read back


class WeightReceiver(Protocol):
    """Holds one set of weights of a known version.

    Every method is called on all ranks of the receiver together, in the same order, and leaves the trainer's RNG,
    thread count and default dtype as they were.
    """

    version: int | None
    """Policy version of the weights it holds; None while no complete set has arrived."""

    float32_weights: frozenset[str]
    """Parameters that it holds in float32, whatever its type: they are published in float32."""

    def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], version: int, *, verify: bool = False
    ) -> UpdateReport:
        """Replace all weights by the named tensors (Hugging Face names, full shapes) and drop what was computed with
        the old ones.

        With `verify` the old values are spoiled first, and what the receiver then holds is compared with what came.
        The producer may reuse a tensor's memory as soon as the next one is asked for. Any error leaves `version` None.
        """
