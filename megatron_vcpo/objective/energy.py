"""Energies: how strongly a trajectory's reward pulls on the gradient. The optimal baseline weights rewards by them.

The energy of trajectory i is the squared norm of what multiplies (R_i - b_i) in the gradient:
e_i = a_i^2 k_i^2 E_i, with a_i the applied importance weight, k_i the length normalizer and E_i a proxy of
||grad sum_t log p||^2. The importance weight enters once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vcpo.objective.segments import segment_ids, segment_sum


def token_logit_energy(logits: Tensor, targets: Tensor) -> Tensor:
    """||onehot(target) - softmax(logits)||^2 for each token.

    Args:
        logits: [..., V]; half precision is computed in fp32.
        targets: [...] int in [0, V).

    Returns:
        [...] in [0, 2], fp32, or fp64 for fp64 logits; no gradient. Equal to 1 - 2 pi_target + sum_v pi_v^2.

    Source: arXiv 2602.07078.
    """
    logits = logits.detach()
    probabilities = torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    # 1 - 2 pi + sum pi^2 cancels to noise (even below 0) once the policy is sharp. The same without subtraction:
    # with q = the probabilities other than the target's, (1 - pi)^2 + sum q^2 = (sum q)^2 + sum q^2.
    others = probabilities.scatter_(-1, targets.long().unsqueeze(-1), 0.0)
    return others.sum(-1).square() + others.square().sum(-1)


def logit_energy(logits: Tensor, targets: Tensor, mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """E_i = sum over masked-in tokens of ||onehot - softmax||^2.

    Args:
        logits: [N, T, V] padded, or [T, V]: packed if cu_seqlens is given, otherwise one trajectory.
        targets: [N, T] or [T], the sampled tokens; arbitrary at masked-out positions.
        mask: [N, T] or [T], bool.
        cu_seqlens: [N + 1] int for packed input.

    Returns:
        [N] (N = 1 for [T, V] without cu_seqlens), fp64 sums of fp32 terms (fp64 terms for fp64 logits).

    Raises:
        ValueError: shapes that do not fit together.

    Source: arXiv 2602.07078.
    """
    if logits.shape[:-1] != targets.shape or targets.shape != mask.shape:
        raise ValueError(
            f"logit_energy: logits {tuple(logits.shape)}, targets {tuple(targets.shape)} and mask {tuple(mask.shape)} "
            "must agree in all but the vocabulary dimension."
        )
    mask = mask.bool()
    # Ignored positions often hold -100, which is not a vocabulary index.
    energies = token_logit_energy(logits, torch.where(mask, targets, 0))
    return _masked_sum(energies, mask, cu_seqlens)


def length_energy(mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """E_i = number of masked-in tokens.

    Args:
        mask: bool, [N, T] padded, or [T]: packed if cu_seqlens is given, otherwise one trajectory.
        cu_seqlens: [N + 1] int for packed input.

    Returns:
        [N] fp64.

    Source: arXiv 2505.23585.
    """
    return _masked_sum(torch.ones_like(mask, dtype=torch.float64), mask.bool(), cu_seqlens)


def _masked_sum(values: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    values = torch.where(mask, values.double(), 0.0)
    if cu_seqlens is None:
        return values.sum(-1).reshape(-1)
    if values.dim() != 1:
        raise ValueError("cu_seqlens goes with packed input: mask and targets [T], logits [T, V].")
    return segment_sum(values, segment_ids(cu_seqlens, values.numel()), cu_seqlens.numel() - 1)


def log_energies(token_energy_sum: Tensor, log_applied_weight: Tensor, log_normalizer: Tensor) -> Tensor:
    """log e_i = 2 log a_i + 2 log k_i + log E_i.

    Args:
        token_energy_sum: [N] E_i >= 0.
        log_applied_weight: [N] log a_i, -inf for a dropped trajectory.
        log_normalizer: [N] or scalar, log k_i.

    Returns:
        [N] fp64: -inf for an energy of zero, NaN for one that cannot be used (E_i negative, infinite or NaN, or
        log a_i NaN or +inf).

    Source: arXiv 2602.17616, with the factor that actually multiplies the reward, not the weight alone.
    """
    energy, log_weight = token_energy_sum.double(), log_applied_weight.double()
    usable = torch.isfinite(energy) & (log_weight < torch.inf)  # the log of a negative energy is NaN by itself
    return torch.where(usable, 2.0 * log_weight + 2.0 * log_normalizer + torch.log(energy), torch.nan)
