"""Estimates of the divergence between policy and reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_K3_LINEAR_BEYOND = 20.0
"""The k3 estimator grows like ref/p; where ref/p exceeds exp(20) its tangent replaces it, so that it cannot
overflow."""


def kl_estimate(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) as a loss term: [T], differentiable in policy_logprobs.

    With l = log p/ref: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l. On the policy's own samples the values of k1 and k3
    are unbiased. The gradient of k2 is that of the KL; that of k1 is zero on average (it only adds noise); that of k3
    is that of the forward KL(reference || policy).

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio = policy_logprobs - reference_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    exponent = -log_ratio
    near = exponent <= _K3_LINEAR_BEYOND
    ratio = torch.exp(torch.where(near, exponent, 0.0))
    tangent = math.exp(_K3_LINEAR_BEYOND) * (1.0 + exponent - _K3_LINEAR_BEYOND)
    return torch.where(near, ratio, tangent) - 1.0 + log_ratio
