"""Send the metrics to TensorBoard and Weights & Biases, through the writers that Megatron has opened.

Megatron opens both on the LAST rank only (`get_tensorboard_writer()` and `get_wandb_writer()` are None elsewhere and
without their flags), so metrics must be logged on that rank. Both get the iteration as their step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

PREFIX = "vcpo/"
_NOT_CURVES = ("iteration", "train_iters")


class TensorBoardWriter(Protocol):
    """The part of torch.utils.tensorboard.SummaryWriter that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class WandbWriter(Protocol):
    """The part of the wandb module (and of a wandb run) that is used."""

    def log(self, data: dict[str, Any], step: int) -> Any: ...


class Trackers:
    """Writes metrics as vcpo/<key> to each of the two writers that is not None."""

    def __init__(self, tensorboard_writer: TensorBoardWriter | None, wandb_writer: WandbWriter | None) -> None:
        self.tensorboard_writer = tensorboard_writer
        self.wandb_writer = wandb_writer

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write one iteration, `metrics["iteration"]`. NaN and infinities are passed on, since both trackers show
        them."""
        iteration = int(metrics["iteration"])
        curves = {PREFIX + key: float(value) for key, value in metrics.items() if key not in _NOT_CURVES}
        if self.tensorboard_writer is not None:
            for tag, value in curves.items():
                self.tensorboard_writer.add_scalar(tag, value, iteration)
        if self.wandb_writer is not None:
            self.wandb_writer.log(curves, step=iteration)
