"""How well logit and length energies approximate exact ones, and what each baseline does to the gradient's variance.

A small Llama-type model sorts numbers of 3 to 7 digits. At several stages of skill, responses to the same prompts are
sampled from the policy itself (lag 0) and from its weights some optimizer steps ago. The gradient of every response is
computed by its own backward pass; their inner products give the gradient's variance over many minibatches under any
baseline.

Three numbers for each baseline, all from the same minibatches:

variance   trace of the covariance of the minibatch's gradient, as a ratio to that of the group mean
noise      the same, divided by the square of the expected gradient's part along the true on-policy gradient: what
           matters when Adam normalizes the scale; '?' if the error is over half the value
bias       norm of the change of the expected gradient that comes from the trajectory's own reward in its baseline, over
           the norm of the expected gradient under the leave-one-out mean. It shrinks the gradient, and may turn it; '<'
           if it is less than two standard errors.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks._baseline_comparison import (
    METHODS,
    SETTINGS,
    Comparison,
    Estimate,
    Method,
    Pool,
    Setting,
    applied_factors,
    best_constant,
    compare,
    proxy_quality,
)
from benchmarks._minibatch_moments import cut
from benchmarks._sorting_policy import (
    Responses,
    SortingTask,
    Trainer,
    build_model,
    sample,
    score,
    trajectory_gradients,
    weighted_gradient,
    weights,
)
from megatron_vcpo.objective import advantage_scales, effective_sample_size, mean_baseline, sequence_log_weights
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import Size


@dataclass(frozen=True, kw_only=True)
class Case:
    """The results for one stage and lag of one seed."""

    facts: dict[str, float]
    comparisons: dict[Setting, dict[Method, Comparison]]


def true_gradients(
    policy: Any, task: SortingTask, options: argparse.Namespace, generator: torch.Generator
) -> dict[Setting, Tensor]:
    """[parameters] of length 1 for each setting: the direction of the on-policy gradient, from many fresh responses."""
    responses = sample(policy, task.draw(options.true_prompts), options.group, generator)
    advantages = responses.rewards - mean_baseline(responses.rewards, responses.prompts, leave_one_out=True)
    directions = {}
    for setting in SETTINGS:
        scales = advantage_scales(responses.rewards, responses.prompts, setting.reward_normalization)
        factors = applied_factors(torch.zeros_like(advantages), responses.lengths, setting.aggregation)
        gradient = weighted_gradient(policy, responses, factors * scales * advantages)
        directions[setting] = gradient / gradient.norm()
    return directions


def make_pool(
    policy: Any,
    behavior: Any,
    task: SortingTask,
    options: argparse.Namespace,
    generator: torch.Generator,
    directions: dict[Setting, Tensor],
) -> Pool:
    """Responses sampled from `behavior`, measured under `policy`."""
    responses: Responses = sample(behavior, task.draw(options.prompts), options.responses, generator)
    with torch.no_grad():
        behavior_logprobs, _ = score(behavior, responses)
        logprobs, token_energies = score(policy, responses)
    gradients = trajectory_gradients(policy, responses)
    return Pool(
        gram=(gradients @ gradients.T).double(),
        logit_energies=torch.where(responses.mask, token_energies.double(), 0.0).sum(-1),
        lengths=responses.lengths,
        rewards=responses.rewards,
        prompts=responses.prompts,
        log_weights=sequence_log_weights(logprobs, behavior_logprobs, responses.mask),
        along={setting: (gradients @ direction).double() for setting, direction in directions.items()},
    )


def examine(pool: Pool, options: argparse.Namespace, generator: torch.Generator) -> Case:
    """All results of one pool."""
    cuts = [
        cut(pool.prompts, group=options.group, groups=options.groups, generator=generator) for _ in range(options.cuts)
    ]
    lengths, grouped = pool.lengths.double(), pool.rewards[cuts[0].rows].view(-1, options.group)
    facts = {
        "reward": float(pool.rewards.mean()),
        "effective sample size (rho)": float(effective_sample_size(pool.log_weights)),
        "tokens of a response": float(lengths.mean()),
        "groups with both rewards": float((grouped.amin(1) < grouped.amax(1)).double().mean()),
    }
    for kind in ("logit", "length"):
        facts |= {f"{kind}, {name}": value for name, value in proxy_quality(pool, cuts, kind).items()}
    facts["best constant, without normalization"] = best_constant(pool, cuts, SETTINGS[1])
    return Case(facts=facts, comparisons={setting: compare(pool, cuts, setting) for setting in SETTINGS})


def run_seed(seed: int, options: argparse.Namespace) -> Iterator[tuple[tuple[int, int], Case]]:
    """Train one model through the stages; yields ((stage, lag), case)."""
    generator = torch.Generator().manual_seed(seed)
    task = SortingTask(seed)
    size = Size(layers=2, hidden=options.hidden, heads=4, query_groups=2, ffn=2 * options.hidden)
    model, behavior = build_model(size, seed), build_model(size, seed)
    trainer = Trainer(model, task, generator)
    for stage, target in enumerate(options.stages):
        steps = trainer.imitate_until(target, count=128, rate=options.warm_up_lr)
        history = [weights(model)]
        for _ in range(max(options.lags)):
            trainer.reinforce(16, options.group, options.lr)
            history.append(weights(model))
        print(f"seed {seed}: {steps} more supervised steps, then {max(options.lags)} of reinforcement", flush=True)
        directions = true_gradients(model, task, options, generator)
        for lag in options.lags:
            behavior.load_state_dict(history[-1 - lag], strict=False)
            pool = make_pool(model, behavior, task, options, generator, directions)
            yield (stage, lag), examine(pool, options, generator)


def together(values: Sequence[Estimate]) -> Estimate:
    """Mean over seeds; its error is the larger of the combined errors and half the range."""
    error = sum(v.error**2 for v in values) ** 0.5 / len(values)
    spread = 0.5 * (max(v.value for v in values) - min(v.value for v in values))
    return Estimate(statistics.fmean(v.value for v in values), max(error, spread))


def plain_cell(values: Sequence[Estimate]) -> str:
    """A cell such as 0.71 ±0.05."""
    value, error = together(values)
    return f"{value:.2f} ±{error:.2f}"


def noise_cell(values: Sequence[Estimate]) -> str:
    """Like `plain_cell`, but '?' if the error is over half the value."""
    value, error = together(values)
    return plain_cell(values) if error < 0.5 * value else "?"


def bias_cell(squares: Sequence[Estimate]) -> str:
    """Root of a squared bias, or its upper bound; empty for a baseline without the trajectory's own reward."""
    value, error = together(squares)
    if value == error == 0.0:
        return ""
    return f"{value**0.5:.2f}" if value > 2.0 * error else f"<{max(0.0, value + 2.0 * error) ** 0.5:.2f}"


def print_table(title: str, columns: Sequence[str], rows: dict[str, list[str]]) -> None:
    """Print a Markdown table for docs/baselines.md."""
    print(f"\n| {title} | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def report(cases: dict[tuple[int, int], list[Case]]) -> None:
    """Print tables over all seeds, with a column for each stage and lag."""
    skill: dict[int, float] = {}
    for (stage, _), found in cases.items():
        skill.setdefault(stage, statistics.fmean(case.facts["reward"] for case in found))
    columns = [f"skill {skill[stage]:.2f}, lag {lag}" for stage, lag in cases]
    facts = {
        name: [plain_cell([Estimate(case.facts[name]) for case in found]) for found in cases.values()]
        for name in next(iter(cases.values()))[0].facts
    }
    print_table("mean of seeds ± half their range", columns, facts)
    for setting in SETTINGS:
        for quantity, of, cell in (
            ("variance", lambda c: c.variance, plain_cell),
            ("noise", lambda c: c.noise, noise_cell),
            ("bias", lambda c: c.squared_bias, bias_cell),
        ):
            rows = {
                f"{name} ({scope})" if scope else name: [
                    cell([of(case.comparisons[setting][name, scope]) for case in found]) for found in cases.values()
                ]
                for name, scope in METHODS
            }
            rows = {name: cells for name, cells in rows.items() if any(cells)}
            print_table(f"{quantity}; {', '.join(setting)}", columns, rows)


def main() -> None:
    """Run the seeds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=float, nargs="+", default=[0.15, 0.45, 0.8], help="rewards to warm up to")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 8, 32], help="optimizer steps")
    parser.add_argument("--prompts", type=int, default=64, help="of a pool")
    parser.add_argument("--responses", type=int, default=24, help="of a prompt in a pool; a multiple of --group")
    parser.add_argument("--group", type=int, default=8, help="responses of a prompt in a minibatch")
    parser.add_argument("--groups", type=int, default=8, help="prompts of a minibatch")
    parser.add_argument("--true-prompts", type=int, default=512, help="whose responses give the true gradient")
    parser.add_argument("--cuts", type=int, default=30, help="ways in which a pool is cut into minibatches")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--warm-up-lr", type=float, default=2e-3)
    parser.add_argument("--lr", type=float, default=3e-4, help="of the reinforcement steps that make the lag")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[tuple[int, int], list[Case]] = {}
    with single_process_megatron():
        for seed in options.seeds:
            for key, case in run_seed(seed, options):
                cases.setdefault(key, []).append(case)
    report(cases)


if __name__ == "__main__":
    main()
