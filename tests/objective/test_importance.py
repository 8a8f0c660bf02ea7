"""Sequence log-weights."""

import math

import numpy as np
import pytest
import torch

from megatron_vcpo.objective import sequence_log_weights
from tests.oracle.estimator import Settings
from tests.oracle.minibatches import pack, random_samples


@pytest.mark.parametrize("seed", range(5))
def test_packed_log_weights_equal_the_oracle_whatever_stands_at_masked_positions(seed):
    samples = random_samples(seed)
    inputs = pack(samples, Settings(), seed=seed)
    result = sequence_log_weights(inputs.policy_logprobs, inputs.behavior_logprobs, inputs.mask, inputs.cu_seqlens)
    np.testing.assert_allclose(result.detach(), [s.log_weight for s in samples], rtol=1e-14, atol=1e-14)


def test_padded_and_packed_layouts_agree_to_the_bit():
    policy, behavior = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    policy[~mask], behavior[~mask] = math.nan, math.inf
    padded = sequence_log_weights(policy, behavior, mask)
    packed = sequence_log_weights(policy.flatten(), behavior.flatten(), mask.flatten(), torch.tensor([0, 5, 10, 15]))
    torch.testing.assert_close(padded, packed, rtol=1e-15, atol=1e-15)
    assert padded[1] == 0.0


def test_sums_are_taken_in_double_precision_even_of_half_precision_inputs():
    policy = torch.full((1, 4096), -0.5, dtype=torch.bfloat16)
    behavior = torch.full((1, 4096), -0.5 - 2**-9, dtype=torch.bfloat16)
    mask = torch.ones(1, 4096, dtype=torch.bool)
    result = sequence_log_weights(policy, behavior, mask)
    assert result.dtype == torch.float64
    assert result.item() == 4096 * (policy.double() - behavior.double())[0, 0].item()


def test_gradients_are_one_on_tokens_and_zero_elsewhere_even_beside_nan():
    policy = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    sequence_log_weights(policy, torch.zeros(3), mask, torch.tensor([0, 3])).sum().backward()
    assert policy.grad.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(("value", "check"), [(math.nan, math.isnan), (math.inf, math.isinf), (1e4, math.isfinite)])
def test_extreme_tokens_show_in_the_log_weight_of_their_trajectory_only(value, check):
    policy = torch.tensor([value, -1.0, -2.0])
    result = sequence_log_weights(policy, torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 3]))
    assert check(result[0].item())
    assert result[1] == -3.0


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        sequence_log_weights(torch.zeros(2), torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match="cu_seqlens"):
        sequence_log_weights(torch.zeros(3), torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match="cu_seqlens"):
        sequence_log_weights(torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(1, 3), torch.tensor([0, 3]))
