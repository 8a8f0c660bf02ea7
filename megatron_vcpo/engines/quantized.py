"""QuantizedEngine: an engine that runs on quantized weights, and is given plain ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_vcpo.checkpoint.quantize.recipe import QuantizationRecipe
from megatron_vcpo.data.digests import digest
from megatron_vcpo.data.trajectory import Float32Array
from megatron_vcpo.engines.protocol import GenerationRequest, GenerationResult, RolloutEngine, Sampling
from megatron_vcpo.sync.receiver import UpdateReport


class QuantizedEngine:
    """`RolloutEngine` around one that was built from a quantized checkpoint: weights are quantized on their way in.

    Args:
        engine: knows the recipe's format from its model folder.
        recipe: of the same folder.
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
        """See `WeightReceiver.update_weights`. The report counts quantized tensors, and digests are of plain ones: what
        the engine then holds is compared with its quantized form by the engine itself."""
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
