"""LossInputs and LossOutputs: the interface of the built-in loss and of a user's own.

A loss is any function LossInputs -> LossOutputs; `load_loss` finds one by its import path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.objective.import_path import load_function


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One packed micro-batch: n trajectories in T token positions.

    Trajectory i owns the positions cu_seqlens[i] : cu_seqlens[i + 1]; positions from cu_seqlens[-1] on are padding.
    Values where `mask` is False are ignored, even NaN and inf. Log-probs are in nats. The denominators belong to the
    whole minibatch, so that any split into micro-batches and data-parallel ranks sums to the same loss. A trajectory
    with a non-finite reward or log-weight is left out of everything; the caller must leave it out of `num_trajectories`
    and `num_tokens` too.

    Example:
        >>> LossInputs(policy_logprobs=p, behavior_logprobs=p.detach(), mask=torch.ones(5, dtype=torch.bool),
        ...            cu_seqlens=torch.tensor([0, 3, 5]), rewards=torch.tensor([1.0, 0.0]),
        ...            group_ids=torch.tensor([7, 7]), advantage_scales=torch.ones(2), num_trajectories=2.0,
        ...            num_tokens=5.0, max_response_length=8, config=VCPOConfig(energy="length"))
    """

    policy_logprobs: Tensor  # [T] with gradient: log-probs of the tokens under the current parameters
    behavior_logprobs: Tensor  # [T] under the distribution that each token was actually drawn from
    mask: Tensor  # [T] bool, True on response tokens that the policy sampled
    cu_seqlens: Tensor  # [n + 1] int, starts at 0
    rewards: Tensor  # [n]
    group_ids: Tensor  # [n] int64, any values
    advantage_scales: Tensor  # [n] factor of (reward - baseline), computed over the whole minibatch
    num_trajectories: float  # usable trajectories of the whole minibatch
    num_tokens: float  # masked-in tokens of the whole minibatch
    max_response_length: int  # longest response allowed, the denominator of seq-mean-token-sum-norm
    config: VCPOConfig
    token_energies: Tensor | None = None  # [T] ||onehot - softmax||^2, no gradient; needed for opob with logit energy
    baselines: Tensor | None = None  # [n]; None: computed here; each scope must lie wholly in this micro-batch
    advantages: Tensor | None = None  # [n] from --vcpo-advantages, in place of (reward - baseline) * scale
    reference_logprobs: Tensor | None = None  # [T]; needed where kl_coefficient > 0
    entropy: Tensor | None = None  # [T] with gradient, nats; needed where entropy_coefficient > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """What a loss returns for one micro-batch.

    The sum of `loss` over micro-batches and data-parallel ranks is the loss of the minibatch. Every metric is a
    tensor [2] = (sum, count), without gradient, to be summed over micro-batches and ranks and then divided; the keys
    are the same in every micro-batch of a run. A count of 0 means "not measured".
    """

    loss: Tensor  # scalar, attached to the graph of policy_logprobs
    metrics: dict[str, Tensor]  # name -> [2]


Loss = Callable[[LossInputs], LossOutputs]


def load_loss(path: str) -> Loss:
    """The loss that --vcpo-loss names. Raises ConfigError if it does not exist."""
    return load_function(path, "--vcpo-loss")
