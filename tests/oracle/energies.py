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
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.mcore.context_parallel import gather_context_rows
from megatron_vcpo.mcore.forward import packed_seq_params, token_statistics
from megatron_vcpo.mcore.logprobs import OutputContext
from megatron_vcpo.mcore.packed_minibatch import PackingSettings, pack_minibatch

KINDS = ("linear", "expert", "router", "norm", "bias", "embedding", "output")


# Fields of TransformerConfig, and what the model is built with.
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied": True},
    "layer-norm-and-biases": {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": torch.nn.functional.gelu,
        "tied": True,
    },
    "query-and-key-norms": {"qk_layernorm": True, "add_qkv_bias": True},
    "full-recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "tied": True,
    },
    "experts": {"experts": 4},
    "experts-tied": {"experts": 4, "tied": True, "qk_layernorm": True},
    "shared-expert": {"experts": 4, "moe_shared_expert_intermediate_size": 16},
    "gated-shared-expert": {"experts": 4, "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "experts-recomputed-with-auxiliary-losses": {
        "experts": 4,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.5,
        "moe_z_loss_coeff": 0.1,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def variant_model(variant: str, dtype: torch.dtype = torch.float64, scale: float = 4.0, **layout: Any) -> Any:
    """A GPTModel of two layers with norms away from 1 and biases away from 0.

    Initialization on the CPU cuts shards out of whole weights, so that every tensor-parallel layout has the same ones.

    Args:
        variant: one of VARIANTS.
        dtype: of the weights.
        scale: of all matrices; the larger, the less do a layer's gradients look like its neighbour's.
        layout: fields of TransformerConfig.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_vcpo.patches.cpu_packed_attention import PackedCoreAttention
    from tests.oracle.tiny_gpt import Size, transformer_config

    options = dict(VARIANTS[variant])
    tied, experts = options.pop("tied", False), options.pop("experts", 0)
    config = transformer_config(Size(experts=experts), dtype, **options, **layout)
    spec = get_gpt_layer_local_spec(
        num_experts=experts or None,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
    )
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    torch.manual_seed(0)
    model = GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    ).to(dtype)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            ranks = config.tensor_model_parallel_size if getattr(parameter, "tensor_model_parallel", False) else 1
            noise = 0.2 * torch.randn(parameter.numel() * ranks, generator=generator).to(dtype)
            parameter.data.add_(noise.chunk(ranks)[torch.distributed.get_rank() % ranks])
        else:
            parameter.data.mul_(scale)
    return model


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
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config: VCPOConfig = energies.config
    batch = pack_minibatch(trajectories, config, packing, energies.device)
    context = OutputContext(vocab_size=vocab_size, temperature=1.0, chunk=chunk, tp_group=energies.groups.tp)

    def loss(micro: Any, output: Any) -> Any:
        if micro.context_rows is not None:
            output = gather_context_rows(output, micro.context_rows, energies.groups.cp)
        return energies.loss(micro, output["logprobs"]), torch.tensor(micro.num_rows, dtype=torch.int), {}

    def forward_step(iterator: Any, model: Any) -> Any:
        micro = next(iterator)
        packed = packed_seq_params(micro)
        with energies.forward(micro, packed):
            output = token_statistics(model, micro, packed, context)
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
