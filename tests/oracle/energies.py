"""Per-trajectory gradient norms by plain autograd, one trajectory at a time on the whole model: the oracle of energies.

And one measuring pass over packed micro-batches, as a step makes it, for what is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.context_parallel import gather_context_rows
from megatron_vcpo.mcore.logprobs import OutputContext, output_processor
from megatron_vcpo.mcore.minibatch import PackingSettings, build_minibatch
from megatron_vcpo.rollout.trajectory import Trajectory

KINDS = ("linear", "expert", "router", "norm", "bias", "embedding", "output")


def kind_of(name: str) -> str:
    """Which kind of parameter a name belongs to."""
    for part, kind in (
        ("word_embeddings", "embedding"),
        ("output_layer", "output"),
        ("router", "router"),
        ("gate_weight", "router"),
        ("norm", "norm"),
        ("local_experts", "expert"),
    ):
        if part in name:
            return kind
    return "bias" if name.endswith("bias") else "linear"


def per_trajectory_energies(
    model: Any, trajectories: Sequence[Trajectory], *, vocab_size: int, token_weights: Any = None
) -> torch.Tensor:
    """[kinds, N] fp64: || grad sum_t m_t a_t log p_t ||^2 over the parameters of each kind, on one process.

    Args:
        model: an unsharded GPTModel, wrapped or not.
        trajectories: N of them.
        vocab_size: real tokens.
        token_weights: (log p [L], beta [L]) -> a [L]; default 1.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    table = torch.zeros(len(KINDS), len(trajectories), dtype=torch.float64)
    model.eval()  # no recomputation, no auxiliary losses
    for i, trajectory in enumerate(trajectories):
        if not trajectory.response_mask.any():
            continue
        ids = torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids])).long()
        attention_mask = torch.triu(torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool), 1)
        logits = model(ids[None], torch.arange(len(ids))[None], attention_mask)[0]
        first = len(trajectory.prompt_ids)
        log_pi = torch.log_softmax(logits[first - 1 : -1, :vocab_size], -1)
        p = log_pi.gather(1, ids[first:, None])[:, 0]
        beta = torch.from_numpy(trajectory.behavior_logprobs).to(p.dtype)
        weights = torch.ones_like(p) if token_weights is None else token_weights(p.detach(), beta)
        target = (weights * p * torch.from_numpy(trajectory.response_mask)).sum()
        gradients = torch.autograd.grad(target, [p for _, p in named], allow_unused=True)
        for (name, _), gradient in zip(named, gradients):
            if gradient is not None:
                table[KINDS.index(kind_of(name)), i] += gradient.double().square().sum()
    model.train()
    return table


def measure(
    energies: Any, trajectories: Sequence[Trajectory], *, packing: PackingSettings, vocab_size: int, chunk: int = 0
) -> Any:
    """One measuring pass of an ExactEnergies over packed micro-batches; its findings."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config: VCPOConfig = energies.config
    batch = build_minibatch(trajectories, config, packing, energies.device)
    context = OutputContext(vocab_size=vocab_size, temperature=1.0, chunk=chunk, tp_group=energies.groups.tp)

    def loss(micro: Any, output: Any) -> Any:
        if micro.context_rows is not None:
            output = gather_context_rows(output, micro.context_rows, energies.groups.cp)
        return energies.loss(micro, output["logprobs"]), torch.tensor(micro.num_rows, dtype=torch.int), {}

    def forward_step(iterator: Any, model: Any) -> Any:
        micro = next(iterator)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=micro.cu_seqlens,
            cu_seqlens_kv=micro.cu_seqlens,
            max_seqlen_q=micro.max_seqlen,
            max_seqlen_kv=micro.max_seqlen,
        )
        with energies.forward(micro, packed):
            output = model(
                micro.tokens,
                micro.position_ids,
                None,
                labels=micro.labels,
                packed_seq_params=packed,
                output_processor=output_processor,
                output_processor_context=context,
            )
        return output, partial(loss, micro)

    feeds = [iter(batch.micro_batches) for _ in energies.model]
    length = batch.micro_batches[0].num_rows if packing.alignment.equal_rows else 64
    with energies.measuring_pass(len(trajectories)):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=energies.model,
            num_microbatches=len(batch.micro_batches),
            seq_length=length,
            decoder_seq_length=length,
            micro_batch_size=1,
            forward_only=False,
        )
        return energies.reduce()


def worst_errors(ours: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Largest relative error of [kinds, N] over trajectories with a gradient, of each kind and in total."""
    errors = {}
    for kind, mine, theirs in [*zip(KINDS, ours, expected), ("total", ours.sum(0), expected.sum(0))]:
        assert not mine[theirs == 0].any(), kind
        if theirs.any():
            errors[kind] = float(((mine - theirs).abs() / theirs)[theirs > 0].max())
    return errors
