"""Held-out evaluation with the engine's current weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_vcpo.config import RolloutConfig
from megatron_vcpo.engines.protocol import GenerationRequest, Generator
from megatron_vcpo.environments.encoding import encode_prompt
from megatron_vcpo.environments.protocol import Environment, Prompt, draw_prompt, size_of
from megatron_vcpo.rollout.collector import EnginePlace, judge, response_seed
from megatron_vcpo.rollout.decode import ResponseDecoder
from megatron_vcpo.rollout.rewards.pool import RewardPool
from megatron_vcpo.rollout.stopping import sampling
from megatron_vcpo.runtime.agreement import raise_together

EVALUATION_SEED = 0x5EED


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Means over all held-out responses that could be judged; NaN if none could."""

    reward: float
    length: float  # tokens
    responses: int
    rejected: int

    def metrics(self) -> dict[str, float]:
        """The means by the names under which they are logged."""
        return {
            "eval/reward": self.reward,
            "eval/length": self.length,
            "eval/responses": float(self.responses),
            "eval/rejected": float(self.rejected),
        }


def evaluate(
    *,
    engine: Generator,
    environment: Environment,
    rewards: RewardPool | None,
    tokenizer: Any,
    decode: ResponseDecoder,
    config: RolloutConfig,
    seed: int,
    place: EnginePlace,
    device: torch.device,
) -> Evaluation:
    """Evaluate --rollout-eval-samples responses to each of the first --rollout-eval-num-prompts held-out prompts.

    Collective over all ranks. Prompts and seeds are the same each time, so two evaluations differ only by the weights.
    Prompts that are too long and rewards that fail are left out and counted.
    """
    prompts = [
        draw_prompt(environment, i)
        for i in range(min(config.eval_num_prompts, size_of(environment) or config.eval_num_prompts))
    ]
    encoded = [encode_prompt(tokenizer, prompt, chat=config.chat_template) for prompt in prompts]
    fitting = [
        (i, p, ids) for i, (p, ids) in enumerate(encoded) if 0 < len(ids) <= int(config.max_prompt_length or len(ids))
    ]
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # reward, length, judged
    failure: Exception | None = None
    try:
        totals += _local(engine, place.share(fitting), rewards, decode, config, seed).to(device)
    except Exception as error:  # noqa: BLE001 - raised on all ranks together
        failure = error
    raise_together(failure)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(totals)
    reward, length, judged = totals.tolist()
    expected = len(prompts) * config.eval_samples
    nan = float("nan")
    return Evaluation(
        reward=reward / judged if judged else nan,
        length=length / judged if judged else nan,
        responses=int(judged),
        rejected=expected - int(judged),
    )


def _local(
    engine: Generator,
    share: list[tuple[int, Prompt, list[int]]],
    rewards: RewardPool | None,
    decode: ResponseDecoder,
    config: RolloutConfig,
    seed: int,
) -> torch.Tensor:
    samples = [(i, p, ids, k) for i, p, ids in share for k in range(config.eval_samples)]
    requests = [GenerationRequest(prompt_ids=ids, seed=response_seed(seed, i, k)) for i, _, ids, k in samples]
    results = engine.generate(requests, sampling(config, config.eval_temperature), progress=False)
    if rewards is None:
        return torch.zeros(3, dtype=torch.float64)
    outcomes = judge(rewards, [p for _, p, _, _ in samples], results, decode)
    kept = [(o.reward, len(r.response_ids)) for o, r in zip(outcomes, results) if o.reward is not None]
    columns = np.array(kept, dtype=np.float64).reshape(-1, 2).sum(0)
    return torch.tensor([columns[0], columns[1], float(len(kept))], dtype=torch.float64)
