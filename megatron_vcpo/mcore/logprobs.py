"""Log-probs, logit energies and entropies of packed tokens from vocabulary-parallel logits.

The logits stay in the model's dtype; forward and backward convert only a bounded block of rows to fp32 at a time.
Columns that only pad the vocabulary are left out: the same flags pad differently at another tensor-parallel size, so
including them would make the log-probs depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# fp32 elements in one block of rows: few enough for a core's cache, or enough to keep a GPU busy.
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
_EXCLUDED = -1.0e30  # logit of a padding column: finite, so that 0 * logit stays 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """Which columns of the vocabulary this rank holds."""

    start: int  # first column, global
    valid: int  # columns that are real tokens; the rest is padding
    group: Any  # tensor-parallel process group, or None for one rank

    @staticmethod
    def of(width: int, vocab_size: int, group: Any) -> VocabShard:
        """The shard of this rank, `width` columns wide, of a vocabulary of `vocab_size` real tokens."""
        rank = dist.get_rank(group) if group is not None else 0
        parallel = group if group is not None and dist.get_world_size(group) > 1 else None
        start = rank * width
        return VocabShard(start=start, valid=max(0, min(width, vocab_size - start)), group=parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """Per-token results of one forward, [T] each, in fp32 (fp64 for fp64 logits)."""

    logprobs: Tensor  # of the target, at the given temperature; differentiable
    energy: Tensor  # 1 - 2 pi_target + sum pi^2 = ||onehot - softmax||^2; not differentiable
    entropy: Tensor  # -sum pi log pi; differentiable


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows, width = logits.shape
    step = max(1, _BLOCK_ELEMENTS[logits.device.type] // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _tempered(logits: Tensor, shard: VocabShard, inverse_temperature: float, shift: Tensor) -> Tensor:
    """logits / temperature - shift, in fp32 or better, padding columns excluded; [t, V] for shift [t]."""
    # One pass: the shift's dtype promotes half-precision logits before anything is computed.
    x = torch.add(-shift.unsqueeze(1), logits, alpha=inverse_temperature)
    if shard.valid < x.size(1):
        x[:, shard.valid :] = _EXCLUDED
    return x


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        inverse = 1.0 / temperature
        rows = logits.size(0)
        if shard.valid > 0:
            peak = logits[:, : shard.valid].amax(1).to(dtype) * inverse
        else:
            peak = torch.full((rows,), _EXCLUDED, dtype=dtype, device=logits.device)
        if shard.group is not None:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=shard.group)
        local = targets - shard.start
        owned = (local >= 0) & (local < shard.valid)
        column = torch.where(owned, local, 0)
        # Over all columns but the target's: sum e, sum e^2, sum e*x. Then x of the target.
        sums = torch.empty(4, rows, dtype=dtype, device=logits.device)
        for block in _blocks(logits):
            x = _tempered(logits[block], shard, inverse, peak[block])
            index, mine = column[block].unsqueeze(1), owned[block]
            sums[3, block] = torch.where(mine, x.gather(1, index).squeeze(1), 0.0)
            x.scatter_(1, index, torch.where(mine, _EXCLUDED, x.gather(1, index).squeeze(1)).unsqueeze(1))
            e = x.exp()
            sums[0, block] = e.sum(1)
            sums[1, block] = torch.linalg.vecdot(e, e)
            sums[2, block] = torch.linalg.vecdot(e, x)
        if shard.group is not None:
            dist.all_reduce(sums, group=shard.group)
        rest, rest_square, rest_moment, target = sums
        at_target = target.exp()
        total = rest + at_target
        log_total = total.log()
        logprobs = target - log_total
        # (1 - pi_target)^2 + sum of the others' pi^2 avoids the cancellation in 1 - 2 pi_target + sum pi^2.
        energy = (rest * rest + rest_square) / (total * total)
        entropy = log_total - (rest_moment + at_target * target) / total
        ctx.save_for_backward(logits, column, owned, peak + log_total, entropy)
        ctx.shard, ctx.inverse = shard, inverse
        ctx.mark_non_differentiable(energy)
        return logprobs, energy, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, _grad_energy: Tensor | None, grad_entropy: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, column, owned, log_partition, entropy = ctx.saved_tensors
        shard, inverse = ctx.shard, ctx.inverse
        grad = torch.empty_like(logits)
        with_entropy = bool(grad_entropy.any())
        for block in _blocks(logits):
            log_pi = _tempered(logits[block], shard, inverse, log_partition[block])
            pi = log_pi.exp()
            if with_entropy:  # d entropy / d x = -pi (log pi + entropy)
                log_pi.add_(entropy[block].unsqueeze(1)).mul_(grad_entropy[block].unsqueeze(1))
                block_grad = pi * (-grad_logprobs[block].unsqueeze(1) - log_pi)
            else:
                block_grad = pi.mul_(-grad_logprobs[block].unsqueeze(1))
            hit = torch.where(owned[block], grad_logprobs[block], 0.0)
            block_grad.scatter_add_(1, column[block].unsqueeze(1), hit.unsqueeze(1))
            if inverse != 1.0:
                block_grad.mul_(inverse)
            grad[block] = block_grad
        return grad, None, None, None


def token_statistics(
    logits: Tensor, targets: Tensor, shard: VocabShard, *, temperature: float = 1.0
) -> TokenStatistics:
    """Log-prob, logit energy and entropy of every row.

    Args:
        logits: [T, V / tp] in the model's dtype, this rank's columns.
        targets: [T] int64, global token ids; the same on every tensor-parallel rank.
        shard: which columns this rank holds.
        temperature: the logits are divided by it first.

    Returns:
        TokenStatistics, equal on every tensor-parallel rank. Source: arXiv 2602.07078 for the energy.
    """
    return TokenStatistics(
        **dict(zip(("logprobs", "energy", "entropy"), _TokenStatistics.apply(logits, targets, shard, temperature)))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputContext:
    """What the last pipeline stage needs to turn hidden states into token statistics."""

    vocab_size: int  # real tokens, without padding
    temperature: float
    chunk: int  # number of tokens whose logits exist at one time; 0: all
    tp_group: Any


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Callable[..., Any],
    output_weight: Tensor | None,
    labels: Tensor,
    context: OutputContext,
    config: Any,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    **_: Any,
) -> dict[str, Tensor]:
    """Hook of `GPTModel.forward(output_processor=...)`: [t, 1, H] hidden states to {'logprobs', 'energy',
    'entropy'}, [T].

    Under sequence parallelism, hidden states hold this rank's T / tp rows and the output layer gathers each chunk rank
    by rank, so the labels are put into the same order.
    """
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    rank_labels = labels.view(ranks, -1)  # [ranks, t]
    rows = hidden_states.size(0)
    step = rows if context.chunk == 0 else max(1, context.chunk // ranks)

    def chunk_statistics(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, _ = output_layer(hidden, weight=output_weight, runtime_gather_output=False)  # [c * ranks, 1, V / tp]
        if scale_logits is not None:
            logits = scale_logits(logits)
        logits = logits.squeeze(1)
        shard = VocabShard.of(logits.size(-1), context.vocab_size, context.tp_group)
        stats = token_statistics(logits, targets, shard, temperature=context.temperature)
        return stats.logprobs.view(ranks, -1), stats.energy.view(ranks, -1), stats.entropy.view(ranks, -1)

    parts = []
    for start in range(0, rows, step):
        hidden = hidden_states[start : start + step]
        targets = rank_labels[:, start : start + step].reshape(-1)
        if context.chunk and torch.is_grad_enabled():
            parts.append(torch.utils.checkpoint.checkpoint(chunk_statistics, hidden, targets, use_reentrant=False))
        else:
            parts.append(chunk_statistics(hidden, targets))
    names = ("logprobs", "energy", "entropy")
    return {name: torch.cat(columns, 1).reshape(-1) for name, columns in zip(names, zip(*parts))}
