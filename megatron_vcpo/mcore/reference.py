"""The frozen reference of the KL penalty: the policy's weights at iteration 0, kept on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class ReferencePolicy:
    """A copy of this rank's parameters and of its routers' expert biases, which can replace the current ones during a
    forward-only pass."""

    def __init__(self, model_chunks: Sequence[nn.Module]) -> None:
        """Copy the parameters of the chunks as they are now."""
        self.weights: list[dict[str, Tensor]] = [
            {name: value.detach().to("cpu", copy=True) for name, value in _state(chunk)} for chunk in model_chunks
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """The copy as a flat dict, for this rank's checkpoint."""
        return {f"{i}.{name}": value for i, chunk in enumerate(self.weights) for name, value in chunk.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace the copy.

        Raises:
            ValueError: names or shapes differ from the model's.
        """
        own = self.state_dict()
        wrong = sorted(set(own) ^ set(state)) + [n for n in own if n in state and own[n].shape != state[n].shape]
        if wrong:
            raise ValueError(
                f"The saved KL reference does not fit the model; names that differ: {', '.join(wrong[:5])}."
            )
        for i, chunk in enumerate(self.weights):
            for name in chunk:
                chunk[name].copy_(state[f"{i}.{name}"])

    @contextlib.contextmanager
    def in_place_of(self, model_chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Run the body with the reference's weights in the model, then put the current ones back, bit for bit."""
        with without_parameter_gather(model_chunks):
            current = ReferencePolicy(model_chunks).weights
            try:
                self._write(model_chunks, self.weights)
                yield
            finally:
                self._write(model_chunks, current)

    @staticmethod
    def _write(model_chunks: Sequence[nn.Module], weights: list[dict[str, Tensor]]) -> None:
        with torch.no_grad():
            for chunk, values in zip(model_chunks, weights):
                for name, value in _state(chunk):
                    value.copy_(values[name])


def _state(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from chunk.named_parameters()
    # Auxiliary-loss-free load balancing changes these outside the optimizer; they affect the choice of experts.
    yield from (pair for pair in chunk.named_buffers() if pair[0].endswith(".expert_bias"))


@contextlib.contextmanager
def without_parameter_gather(model_chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Finish the pending all-gather of --overlap-param-gather and keep its hooks from running: in the next forward pass
    they would overwrite the weights that were put into the model."""
    hooked = [chunk for chunk in model_chunks if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
