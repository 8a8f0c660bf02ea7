"""The arithmetic of benchmarks/baseline_variance.py against explicit gradients, in fp64."""

import itertools

import pytest
import torch

from benchmarks._baseline_comparison import (
    METHODS,
    Pool,
    Setting,
    baseline_values,
    best_constant,
    coefficients,
    compare,
    without_own_reward,
)
from benchmarks._minibatch_moments import (
    Batches,
    correlation,
    cut,
    gradient_sums,
    log_product,
    means,
    moments,
    ranks,
    standard_error,
)

PROMPTS, RESPONSES, PARAMETERS = 4, 6, 5
N = PROMPTS * RESPONSES
MEAN, SUM = Setting("seq-mean-token-mean", "none"), Setting("seq-mean-token-sum", "none")
TRUE = torch.tensor([0.6, 0.0, -0.8, 0.0, 0.0], dtype=torch.float64)
STD = Setting("seq-mean-token-mean", "group-std")


@pytest.fixture
def gradients():
    return torch.randn(N, PARAMETERS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def pool(gradients):
    """Prompts of unequal difficulty, in no order, and weights on both sides of the cap."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.arange(N)[torch.randperm(N, generator=generator)] % PROMPTS
    uniform = torch.rand(3, N, dtype=torch.float64, generator=generator)
    return Pool(
        gram=gradients @ gradients.T,
        logit_energies=uniform[0] + 0.1,
        lengths=torch.randint(2, 9, (N,), generator=generator),
        rewards=(uniform[1] < (prompts + 1) / 5).double(),
        prompts=prompts,
        log_weights=6.0 * uniform[2] - 3.0,
        along=dict.fromkeys((MEAN, SUM, STD), gradients @ TRUE),
    )


@pytest.fixture
def batches(pool):
    return cut(pool.prompts, group=3, groups=2, generator=torch.Generator().manual_seed(3))


def explicit(gradients, batches, coefficients):
    """[m, parameters]: the gradient of every minibatch."""
    return torch.stack([(c[:, None] * gradients[rows]).sum(0) for c, rows in zip(coefficients, batches.rows)])


def explicit_moments(x):
    """Trace of the sample covariance, and the mean inner product of different minibatches."""
    pairs = [float(a @ b) for a, b in itertools.combinations(x, 2)]
    return float(x.var(0, unbiased=True).sum()), sum(pairs) / len(pairs)


def test_moments_from_inner_products_are_those_of_the_gradients_with_and_without_each_minibatch(gradients, batches):
    weights = torch.randn(2, *batches.rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    found = moments(gradient_sums(gradients @ gradients.T, batches.rows, weights))
    m = len(batches.rows)
    assert m == 4
    for k in range(2):
        x = explicit(gradients, batches, weights[k])
        for column, kept in enumerate([list(range(m)), *([j for j in range(m) if j != i] for i in range(m))]):
            variance, signal = explicit_moments(x[kept])
            assert float(found.variance[k, column]) == pytest.approx(variance, rel=1e-10)
            assert float(found.signal[k, column]) == pytest.approx(signal, rel=1e-10)


def test_standard_error_of_a_mean_is_the_textbook_one_averaged_over_cuts():
    values = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    estimates = torch.cat([values.mean(1, keepdim=True), (values.sum(1, keepdim=True) - values) / 8], 1)
    expected = (values.var(1) / 9.0).mean().sqrt()
    assert float(standard_error(estimates)) == pytest.approx(float(expected), rel=1e-12)


def test_the_error_of_a_ratio_is_that_of_its_logarithm_where_deviations_are_small():
    noise = torch.randn(2, 1, 1, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    a, b = 2.0 + 1e-5 * noise[0], 3.0 + 1e-5 * noise[1]
    found, expected = standard_error(log_product([a, b], [1.0, -1.0])), standard_error((a / b).log())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def test_means_are_those_of_all_and_of_all_but_one():
    assert means(torch.tensor([[1.0, 2.0, 6.0]])).tolist() == [[3.0, 4.0, 3.5, 1.5]]


def test_a_cut_uses_no_response_twice_and_gives_a_minibatch_whole_groups_of_distinct_prompts(pool, batches):
    assert sorted(batches.rows.flatten().tolist()) == list(range(N))
    for rows, groups in zip(batches.rows, batches.groups):
        assert sorted(pool.prompts[rows].unique(return_counts=True)[1].tolist()) == [3, 3]
        for group in groups.unique():
            assert len(pool.prompts[rows[groups == group]].unique()) == 1
    owners = [set(groups.tolist()) for groups in batches.groups]
    assert len(set.union(*owners)) == sum(map(len, owners)) == 8


@pytest.mark.parametrize("setting", [MEAN, SUM, STD])
def test_coefficients_are_capped_weights_over_lengths_times_what_the_baseline_leaves(pool, batches, setting):
    found = coefficients(pool, batches, torch.full(batches.rows.shape, 0.3, dtype=torch.float64), setting)
    assert (pool.log_weights.exp() > 8.0).any()
    for k, rows in enumerate(batches.rows):
        for j, i in enumerate(rows):
            factor = min(float(pool.log_weights[i].exp()), 8.0)
            factor /= 1.0 if setting == SUM else float(pool.lengths[i])
            if setting == STD:
                deviation = float(pool.rewards[rows[batches.groups[k] == batches.groups[k, j]]].std(correction=0))
                factor = factor / deviation if deviation > 0.0 else 0.0
            assert float(found[k, j]) == pytest.approx(factor * (float(pool.rewards[i]) - 0.3) / 6.0, rel=1e-10)


def test_optimal_baselines_weigh_rewards_with_squared_norms_of_what_multiplies_them(pool, gradients, batches):
    lengths, weights = pool.lengths.double(), pool.log_weights.exp().clamp(max=8.0)
    energies = {
        "exact": (gradients * (weights / lengths)[:, None]).square().sum(1),
        "logit": (weights / lengths).square() * pool.logit_energies,
        "length": (weights / lengths).square() * lengths,
    }
    for (kind, e), scope in itertools.product(energies.items(), ("group", "minibatch")):
        found = baseline_values((f"opob, {kind}", scope), pool, batches, MEAN.aggregation)
        for rows, groups, values in zip(batches.rows, batches.groups, found):
            for i in range(6):
                within = rows[groups == groups[i]] if scope == "group" else rows
                expected = float((e[within] * pool.rewards[within]).sum() / e[within].sum())
                assert float(values[i]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_best_constant_has_less_variance_than_its_neighbours(pool, gradients):
    generator = torch.Generator().manual_seed(6)
    cuts = [cut(pool.prompts, group=3, groups=2, generator=generator) for _ in range(3)]
    best = best_constant(pool, cuts, MEAN)

    def variance(constant):
        total = 0.0
        for batches in cuts:
            c = coefficients(pool, batches, torch.full(batches.rows.shape, constant, dtype=torch.float64), MEAN)
            total += explicit_moments(explicit(gradients, batches, c))[0]
        return total

    assert variance(best) < min(variance(best - 0.01), variance(best + 0.01))


@pytest.mark.parametrize("setting", [SUM, STD])
def test_a_comparison_gives_ratios_of_explicit_moments(pool, gradients, batches, setting):
    second = Batches(rows=batches.rows.flip(0), groups=batches.groups.flip(0))
    found = compare(pool, [batches, second], setting)
    assert list(found) == list(METHODS)
    constant = best_constant(pool, [batches], setting)

    def minibatches(method):
        values = baseline_values(method, pool, batches, setting.aggregation, constant)
        return explicit(gradients, batches, coefficients(pool, batches, values, setting))

    variance, _ = explicit_moments(minibatches(("mean", "group")))
    along = float(minibatches(("mean", "group")).mean(0) @ TRUE)
    _, unbiased = explicit_moments(minibatches(("leave-one-out", "group")))
    for method, comparison in found.items():
        own_variance, _ = explicit_moments(minibatches(method))
        own_along = float(minibatches(method).mean(0) @ TRUE)
        _, shift = explicit_moments(minibatches(method) - minibatches(without_own_reward(method)))
        assert comparison.variance.value == pytest.approx(own_variance / variance, rel=1e-9)
        assert comparison.noise.value == pytest.approx(own_variance / variance * (along / own_along) ** 2, rel=1e-9)
        assert comparison.squared_bias.value == pytest.approx(shift / unbiased, rel=1e-9, abs=1e-12)


def test_the_mean_is_a_leave_one_out_mean_that_its_own_reward_shrinks(pool, batches):
    found = compare(pool, [batches], SUM)
    assert found["mean", "group"].squared_bias.value == pytest.approx((1 / 3) ** 2, rel=1e-9)  # groups of 3
    assert found["mean", "group"].squared_bias.error < 1e-9
    assert found["leave-one-out", "group"].squared_bias == (0.0, 0.0)
    assert found["leave-one-out", "group"].variance.value == pytest.approx((3 / 2) ** 2, rel=1e-9)
    assert found["leave-one-out", "group"].noise.value == pytest.approx(1.0, rel=1e-9)
    assert found["leave-one-out", "group"].noise.error < 1e-9


def test_ranks_share_their_mean_where_values_are_equal_and_correlation_is_that_of_numpy():
    assert ranks(torch.tensor([5.0, 1.0, 5.0, 9.0])).tolist() == [1.5, 0.0, 1.5, 3.0]
    a, b = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    assert correlation(a, b) == pytest.approx(float(torch.corrcoef(torch.stack([a, b]))[0, 1]), rel=1e-12)
