"""A small Llama-type GPTModel of Megatron-Core that learns to sort digits: training, sampling, and the gradient of each
response. baseline_variance.py measures on it."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron_vcpo.environments.sort_digits import SortDigits
from megatron_vcpo.objective import mean_baseline, token_logit_energy
from tests.oracle.tiny_gpt import Size, transformer_config

ALPHABET = "0123456789:"
END = len(ALPHABET)
DIGITS = range(3, 8)  # numbers of digits of prompts, so that lengths differ between prompts
MAX_RESPONSE = 10  # tokens with END; the longest answer has 8, so answers can be too long


@dataclass(frozen=True, kw_only=True)
class Responses:
    """Padded sequences: prompt, response, then END up to the common width W."""

    tokens: Tensor  # [n, W]
    prompt_lengths: Tensor  # [n]
    ends: Tensor  # [n] number of tokens of prompt and response
    prompts: Tensor  # [n] index of the prompt
    rewards: Tensor  # [n] fp64

    @property
    def mask(self) -> Tensor:
        """[n, W - 1] bool: which of tokens[:, 1:] belong to the response."""
        target = torch.arange(1, self.tokens.size(1))
        return (target >= self.prompt_lengths[:, None]) & (target < self.ends[:, None])

    def select(self, rows: Tensor) -> Responses:
        """The responses at the indices `rows`."""
        return Responses(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @property
    def lengths(self) -> Tensor:
        """[n] number of response tokens."""
        return self.ends - self.prompt_lengths


class SortingTask:
    """Prompts of several lengths, each with the environment that rewards it."""

    def __init__(self, seed: int) -> None:
        self._environments = [
            SortDigits(split="train", seed=seed, n_digits=n, prompt_template="{digits}:") for n in DIGITS
        ]
        self._random = random.Random(seed)
        self._next = 0

    def draw(self, count: int) -> list[tuple[SortDigits, Any]]:
        """The next prompts, each with the environment that judges it."""
        drawn = []
        for _ in range(count):
            environment = self._random.choice(self._environments)
            drawn.append((environment, environment.prompt(self._next)))
            self._next += 1
        return drawn


def build_model(size: Size, seed: int) -> Any:
    """The GPTModel, in fp32 and without dropout."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_vcpo.patches.cpu_packed_attention import PackedCoreAttention

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    torch.manual_seed(seed)
    return GPTModel(
        transformer_config(size),
        spec,
        vocab_size=END + 1,
        max_sequence_length=DIGITS.stop + MAX_RESPONSE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def weights(model: Any) -> dict[str, Tensor]:
    """A copy of all parameters, for `load_state_dict(strict=False)`."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _logits(model: Any, tokens: Tensor) -> Tensor:
    """[n, W] tokens to [n, W, V]; attention is causal, so padding at the end has no effect on what comes before."""
    return model(tokens, torch.arange(tokens.size(1)).expand_as(tokens), None)


def score(model: Any, responses: Responses) -> tuple[Tensor, Tensor]:
    """Log-probs (differentiable) and logit energies of tokens[:, 1:]: [n, W - 1] each."""
    logits, targets = _logits(model, responses.tokens[:, :-1]), responses.tokens[:, 1:]
    logprobs = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    return logprobs, token_logit_energy(logits, targets)


def _encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def _padded(rows: list[list[int]], width: int) -> Tensor:
    return torch.tensor([row + [END] * (width - len(row)) for row in rows])


def answers(drawn: list[tuple[SortDigits, Any]]) -> Responses:
    """The environment's own answers."""
    prompts = [_encode(prompt.text) for _, prompt in drawn]
    rows = [start + _encode(prompt.answer) + [END] for start, (_, prompt) in zip(prompts, drawn)]
    return Responses(
        tokens=_padded(rows, max(map(len, rows))),
        prompt_lengths=torch.tensor([len(start) for start in prompts]),
        ends=torch.tensor([len(row) for row in rows]),
        prompts=torch.arange(len(rows)),
        rewards=torch.ones(len(rows), dtype=torch.float64),
    )


@torch.no_grad()
def sample(model: Any, drawn: list[tuple[SortDigits, Any]], count: int, generator: torch.Generator) -> Responses:
    """`count` responses of every prompt, at temperature 1, and their rewards."""
    prompts = torch.arange(len(drawn)).repeat_interleave(count)
    starts = [_encode(drawn[p][1].text) for p in prompts.tolist()]
    tokens = _padded(starts, max(map(len, starts)) + MAX_RESPONSE)
    prompt_lengths = torch.tensor([len(start) for start in starts])
    ends, alive = prompt_lengths.clone(), torch.ones(len(starts), dtype=torch.bool)
    for _ in range(MAX_RESPONSE):
        rows = alive.nonzero()[:, 0]
        if not len(rows):
            break
        last = ends[rows] - 1
        logits = _logits(model, tokens[rows, : int(last.max()) + 1])[torch.arange(len(rows)), last]
        drawn_tokens = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]
        tokens[rows, ends[rows]] = drawn_tokens
        ends[rows] += 1
        alive[rows] = drawn_tokens != END
    rewards = []
    for row, (start, end, prompt) in enumerate(zip(prompt_lengths.tolist(), ends.tolist(), prompts.tolist())):
        text = "".join(ALPHABET[token] for token in tokens[row, start:end].tolist() if token != END)
        environment, question = drawn[prompt]
        rewards.append(environment.reward(question, text))
    return Responses(
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        ends=ends,
        prompts=prompts,
        rewards=torch.tensor(rewards, dtype=torch.float64),
    )


def trajectory_gradients(model: Any, responses: Responses) -> Tensor:
    """[n, parameters] fp32: grad sum_t log p_t of each response, by one backward pass each."""
    parameters = list(model.parameters())
    out = torch.empty(len(responses.ends), sum(p.numel() for p in parameters))
    for row, (start, end) in enumerate(zip(responses.prompt_lengths.tolist(), responses.ends.tolist())):
        ids = responses.tokens[row, :end]
        logprobs = torch.log_softmax(_logits(model, ids[None, :-1])[0], -1).gather(-1, ids[1:, None])
        gradients = torch.autograd.grad(logprobs[start - 1 :].sum(), parameters)
        torch.cat([gradient.flatten() for gradient in gradients], out=out[row])
    return out


def weighted_gradient(model: Any, responses: Responses, factors: Tensor) -> Tensor:
    """[parameters] fp32: the mean over responses of factor_i grad sum_t log p_t, computed for a thousand at a time."""
    parameters = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters))
    for rows in torch.arange(len(factors)).split(1024):
        part = responses.select(rows)
        logprobs = torch.where(part.mask, score(model, part)[0], 0.0).sum(-1)
        gradients = torch.autograd.grad((factors[rows].float() * logprobs).sum() / len(factors), parameters)
        total += torch.cat([gradient.flatten() for gradient in gradients])
    return total


class Trainer:
    """Adam on one model: supervised steps on answers, and policy-gradient steps on fresh samples."""

    def __init__(self, model: Any, task: SortingTask, generator: torch.Generator) -> None:
        self.model = model
        self.task = task
        self.generator = generator
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    def _step(self, loss: Tensor, rate: float) -> None:
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def imitate(self, count: int, rate: float) -> None:
        """One supervised step on the answers to `count` prompts."""
        batch = answers(self.task.draw(count))
        self._step(-score(self.model, batch)[0][batch.mask].mean(), rate)

    def reinforce(self, prompts: int, count: int, rate: float) -> None:
        """One on-policy step with the group mean as baseline."""
        batch = sample(self.model, self.task.draw(prompts), count, self.generator)
        advantages = batch.rewards - mean_baseline(batch.rewards, batch.prompts)
        logprobs = torch.where(batch.mask, score(self.model, batch)[0], 0.0)
        self._step(-(advantages / batch.lengths * logprobs.sum(-1)).mean(), rate)

    def reward(self, prompts: int = 128) -> float:
        """Mean reward of one sample for each of `prompts` prompts."""
        return float(sample(self.model, self.task.draw(prompts), 1, self.generator).rewards.mean())

    def imitate_until(self, reward: float, *, count: int, rate: float, most: int = 3000) -> int:
        """Supervised steps until the sampled reward reaches `reward`; returns how many.

        Raises:
            RuntimeError: not reached within `most` steps.
        """
        for step in range(most):
            if step % 10 == 0 and self.reward() >= reward:
                return step
            self.imitate(count, rate * min(1.0, (step + 1) / 10))
        raise RuntimeError(f"The policy did not reach a reward of {reward} in {most} supervised steps.")
