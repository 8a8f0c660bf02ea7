"""QuantizedEngine: an engine that is sent plain weights and runs on quantized ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_vcpo.checkpoint.quantize.recipe import QuantizationRecipe
from megatron_vcpo.data.digests import digest
from megatron_vcpo.data.trajectory import Float32Array
from megatron_vcpo.engines.protocol import GenerationRequest, GenerationResult, RolloutEngine, Sampling
from megatron_vcpo.sync.receiver import UpdateReport


class QuantizedEngine:
    """`RolloutEngine` around an engine built from a quantized checkpoint: quantizes weights on their way to it.

    Args:
        engine: built from a model folder in the recipe's format.
        recipe: from the same folder.
    """

    def __init__(self, engine: RolloutEngine, recipe: QuantizationRecipe) -> None:
        self._engine = engine
        self._recipe = recipe
        self.float32_weights = engine.float32_weights

    @property
    def version(self) -> int | None:
        """See `WeightReceiver.version`."""
        return self._engine.version

    @version.setter
    def version(self, value: int | None) -> None:
        self._engine.version = value

    def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], version: int, *, verify: bool = False
    ) -> UpdateReport:
        """See `WeightReceiver.update_weights`. The report counts quantized tensors, but its digests are of plain ones;
        the engine itself compares what it holds with the quantized tensors."""
        received: dict[str, int] = {}

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if verify:
                    received[name] = digest(tensor)
                yield name, tensor

        report = self._engine.update_weights(self._recipe.stream(noted()), version, verify=verify)
        return UpdateReport(
            copied=report.copied,
            reloaded=report.reloaded,
            received=received if verify else None,
            unreadable=report.unreadable,
        )

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, progress: bool
    ) -> list[GenerationResult]:
        """See `Generator.generate`."""
        return self._engine.generate(requests, sampling, progress=progress)

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[Float32Array]:
        """See `Generator.score`."""
        return self._engine.score(sequences, prompt_lengths)

    def shutdown(self) -> None:
        """See `Generator.shutdown`."""
        self._engine.shutdown()
