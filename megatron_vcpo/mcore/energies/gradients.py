"""Three methods (--vcpo-energy-method) to get a step's gradient with exact energies.

two-pass      a backward that only measures, then the ordinary step with known baselines
deferred      the step's own backward measures; inputs and output gradients are kept until the baselines are known, and
              the weight gradients are formed only then
accumulators  the step's own backward measures and adds up two gradients, one with R_i and one with 1 in place of
              (R_i - b); the minibatch's single baseline combines them

The last two form only the gradients of the policy term. Penalties and auxiliary losses, which no advantage multiplies,
then need a backward of their own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.energies.contributions import Contribution, Products
from megatron_vcpo.mcore.energies.exact import ExactEnergies, Measured
from megatron_vcpo.mcore.energies.isolation import router_statistics_kept, silent_finalization
from megatron_vcpo.mcore.packed_minibatch import PackedMinibatch
from megatron_vcpo.mcore.packing import MicroBatch
from megatron_vcpo.mcore.reductions import group_size
from megatron_vcpo.objective import length_normalizers, sequence_log_applied

Values = npt.NDArray[np.float64]


class Step(Protocol):
    """What these methods need of the policy step."""

    minibatch: PackedMinibatch | None

    def run_pass(self, model: list[Any], forward_backward: Any, **options: Any) -> Any:
        """A pass of the schedule over the minibatch, in addition to the step's own."""

    def close_pass(self) -> None:
        """Check that every layer read the routes of the backward pass that just ended."""

    def set_baselines(self, measured: Measured) -> None:
        """Set the minibatch's baselines from what was measured."""

    def evaluate(self, micro: MicroBatch, output: dict[str, Tensor]) -> Any:
        """The loss of one micro-batch; its metrics are added to the step's."""

    def forget_metrics(self) -> None:
        """Drop the step's metrics so far."""

    def applied_factors(self, log_weights: Tensor, lengths: Tensor) -> Tensor:
        """What multiplies -(R_i - b_i) * scale_i * grad sum_t a_it log p_it in the step's gradient: [n] fp64."""


def applied_factors(
    log_weights: Tensor, lengths: Tensor, batch: PackedMinibatch, config: VCPOConfig, max_response_length: int
) -> Tensor:
    """a_i * k_i / N times the number of rows that Megatron divides gradients by: [n] fp64, 0 where lam_i is not
    finite."""
    normalizers = length_normalizers(
        lengths,
        config,
        num_trajectories=float(batch.num_trajectories),
        num_tokens=float(max(batch.num_response_tokens, 1)),
        max_response_length=max_response_length,
    )
    weights = sequence_log_applied(log_weights, lengths, config).exp()
    factors = weights * normalizers * (batch.num_rows / max(1, batch.num_trajectories))
    return torch.where(torch.isfinite(log_weights), factors, 0.0)


class TwoPass:
    """Measures in a pass of its own: works with any model and loss, but costs a second forward and backward."""

    def __init__(self, energies: ExactEnergies) -> None:
        self.energies = energies

    @property
    def measuring(self) -> bool:
        """Whether a measuring pass is under way."""
        return self.energies.measuring

    def forward(self, micro: MicroBatch, packed_seq_params: Any) -> AbstractContextManager[None]:
        """Wrap the model's forward of one micro-batch."""
        return self.energies.forward(micro, packed_seq_params)

    def begin(self, step: Step, model: list[Any], forward_backward: Any) -> None:
        """Call before the step's own passes; collective over all ranks."""
        assert step.minibatch is not None
        with router_statistics_kept(model), self.energies.measuring_pass(step.minibatch.num_trajectories):
            step.run_pass(model, forward_backward, forward_only=False)
            step.close_pass()
            measured = self.energies.reduce()
        step.set_baselines(measured)

    def loss(self, step: Step, micro: MicroBatch, output: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """What a measuring pass back-propagates, and what Megatron logs of it."""
        return self.energies.loss(micro, output["logprobs"]), {}

    def settle(self, step: Step, model: list[Any]) -> None:
        """Call after the step's last backward, before its gradients are reduced; collective over all ranks."""


class _OnePass(TwoPass):
    """Measures in the step's own backward; its gradients are complete once `settle` has run."""

    products: Products

    def __init__(self, energies: ExactEnergies) -> None:
        super().__init__(energies)
        self.with_penalties = _has_penalties(energies.config, energies.transformer)
        self._open = ExitStack()
        self._forward_backward: Any = None
        self._outputs: list[tuple[MicroBatch, dict[str, Tensor], Tensor]] = []

    def begin(self, step: Step, model: list[Any], forward_backward: Any) -> None:
        assert step.minibatch is not None
        self._open.close()
        self._forward_backward = forward_backward
        self._outputs = []
        self._reset(step.minibatch)
        if self.with_penalties:  # then only the penalties' own pass may count
            self._open.enter_context(router_statistics_kept(model))
        self._open.enter_context(
            self.energies.measuring_pass(
                step.minibatch.num_trajectories, sink=self._take, products=self.products, finalize=True
            )
        )

    def loss(self, step: Step, micro: MicroBatch, output: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logged = output["logprobs"].new_tensor([0.0, 1.0])  # the loss is not known yet; settle() fills it in
        self._outputs.append((micro, {name: value.detach() for name, value in output.items()}, logged))
        return self.energies.loss(micro, output["logprobs"], self._backward_factors(step, micro, output)), {
            "vcpo loss": logged
        }

    def settle(self, step: Step, model: list[Any]) -> None:
        measured = self.energies.reduce()
        self._open.close()
        step.set_baselines(measured)
        assert step.minibatch is not None
        baselines = step.minibatch.baselines
        self._form_gradients(step, measured)
        if self.with_penalties:
            self._add_penalties(step, model)
            step.minibatch.baselines = baselines
            step.forget_metrics()
        outputs, self._outputs = self._outputs, []
        with torch.no_grad():
            for micro, output, logged in outputs:
                logged[0] = step.evaluate(micro, output).loss

    def _add_penalties(self, step: Step, model: list[Any]) -> None:
        """Add the gradients of everything that no advantage multiplies: an ordinary pass with every advantage zero."""
        assert step.minibatch is not None
        step.close_pass()
        step.minibatch.baselines = step.minibatch.rewards.double()
        with silent_finalization(self.energies.transformer):
            step.run_pass(model, self._forward_backward, forward_only=False)

    def _reset(self, batch: PackedMinibatch) -> None:
        raise NotImplementedError

    def _take(self, param: nn.Parameter, contribution: Contribution) -> None:
        raise NotImplementedError

    def _backward_factors(self, step: Step, micro: MicroBatch, output: dict[str, Tensor]) -> Tensor | None:
        return None

    def _form_gradients(self, step: Step, measured: Measured) -> None:
        raise NotImplementedError


class Deferred(_OnePass):
    """Keeps rows, or the trajectories' weight gradients where they are smaller, until the baselines are known.

    Without pipeline stages, and if micro-batches hold whole groups, a group's baseline is known after the backward of
    its micro-batch; otherwise at the end of the step.
    """

    products = Products.SMALLER

    def begin(self, step: Step, model: list[Any], forward_backward: Any) -> None:
        assert step.minibatch is not None
        in_groups = self.energies.config.baseline_scope == "group" and step.minibatch.plan.groups_together
        self._step = step if in_groups and group_size(self.energies.layout.pp) == 1 else None
        self._begun = 0
        super().begin(step, model, forward_backward)

    def forward(self, micro: MicroBatch, packed_seq_params: Any) -> AbstractContextManager[None]:
        if self._step is not None and self._begun:
            measured = self.energies.reduce()
            self._step.set_baselines(measured)
            self._form_gradients(self._step, measured)
        self._begun += 1
        return super().forward(micro, packed_seq_params)

    def _reset(self, batch: PackedMinibatch) -> None:
        self._kept: list[tuple[nn.Parameter, Contribution]] = []

    def _take(self, param: nn.Parameter, contribution: Contribution) -> None:
        self._kept.append((param, contribution))

    def _form_gradients(self, step: Step, measured: Measured) -> None:
        batch = step.minibatch
        assert batch is not None
        assert batch.baselines is not None
        advantages = (batch.rewards.double() - batch.baselines) * batch.advantage_scales.double()
        coefficients = -advantages * step.applied_factors(measured.log_weights, measured.lengths)
        values = torch.where(torch.isfinite(batch.rewards), coefficients, 0.0).cpu().numpy()
        self._kept.reverse()
        while self._kept:  # free each as soon as it is used
            param, contribution = self._kept.pop()
            contribution.add_gradient(param.main_grad, values)


class Accumulators(_OnePass):
    """Keeps a second gradient buffer. Rewards are centred on their mean, to keep the combination precise."""

    products = Products.ALWAYS

    def _reset(self, batch: PackedMinibatch) -> None:
        rewards, scales = batch.rewards.double().cpu(), batch.advantage_scales.double().cpu()
        usable = torch.isfinite(rewards)
        self._center = float(rewards[usable].mean()) if usable.any() else 0.0
        self._ones: Values = torch.where(usable, scales, 0.0).numpy()
        self._rewards: Values = torch.where(usable, scales * (rewards - self._center), 0.0).numpy()
        self._with_ones: dict[nn.Parameter, Tensor] = {}

    def _take(self, param: nn.Parameter, contribution: Contribution) -> None:
        if param not in self._with_ones:
            self._with_ones[param] = torch.zeros_like(param.main_grad)
        contribution.add_gradient(param.main_grad, self._rewards)
        contribution.add_gradient(self._with_ones[param], self._ones)

    def _backward_factors(self, step: Step, micro: MicroBatch, output: dict[str, Tensor]) -> Tensor:
        log_weights, lengths = self.energies.weights_and_lengths(micro, output["logprobs"])
        return -step.applied_factors(log_weights, lengths)

    def _form_gradients(self, step: Step, measured: Measured) -> None:
        assert step.minibatch is not None
        assert step.minibatch.baselines is not None
        baselines = step.minibatch.baselines  # one for all trajectories
        shift = float(baselines[0]) - self._center if len(baselines) else 0.0
        for param, gradient in self._with_ones.items():
            param.main_grad.add_(gradient, alpha=-shift)
        self._with_ones = {}


def exact_energies(model: list[Any], groups: Any, config: VCPOConfig, device: torch.device) -> TwoPass | None:
    """The method that --vcpo-energy-method names; None if the baselines need no exact energies.

    Collective over all ranks. Raises ConfigError, on all of them, for a model that cannot be measured.
    """
    if config.energy != "exact" or not config.baseline.startswith("opob"):
        return None
    ways = {"two-pass": TwoPass, "deferred": Deferred, "accumulators": Accumulators}
    return ways[config.energy_method](ExactEnergies(model, groups, config, device))


def _has_penalties(config: VCPOConfig, transformer: Any) -> bool:
    coefficients = transformer.moe_aux_loss_coeff if transformer.num_moe_experts else 0.0
    auxiliary = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    z_loss = bool(transformer.num_moe_experts and transformer.moe_z_loss_coeff)
    return auxiliary or z_loss or config.kl_coefficient > 0.0 or config.entropy_coefficient != 0.0
