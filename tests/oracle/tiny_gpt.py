"""A small Llama-type GPTModel with Megatron's optimizer, on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class TinyGPT:
    """What a Megatron-Core loop holds."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    groups: Any
    config: Any

    def parameters(self) -> list[torch.Tensor]:
        """Copies of all parameters."""
        return [p.detach().clone() for chunk in self.model for p in chunk.parameters()]


VOCAB, PADDED_VOCAB, SEQUENCE = 60, 64, 48


def build_tiny_gpt(groups: Any, *, lr: float = 1e-2, seed: int = 0, experts: int = 0, **overrides: Any) -> TinyGPT:
    """Two layers, hidden 32, fp32 unless `params_dtype` says otherwise."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_vcpo.optim import EssParamScheduler, EssSettings
    from patches.cpu_packed_attention import PackedCoreAttention

    ess = overrides.pop("ess", EssSettings())
    dtype = overrides.pop("params_dtype", torch.float32)
    moe = dict(num_moe_experts=experts, moe_router_topk=2, moe_ffn_hidden_size=32,
               moe_router_load_balancing_type="none") if experts else {}
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, bias_activation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, moe_token_dispatcher_type="alltoall", normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, calculate_per_token_loss=True,
        variable_seq_lengths=True, params_dtype=dtype, pipeline_dtype=dtype, fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16, **moe, **overrides,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=experts or None, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    torch.manual_seed(seed)
    gpt: Any = GPTModel(
        config, spec, vocab_size=PADDED_VOCAB, max_sequence_length=SEQUENCE, position_embedding_type="rope",
        parallel_output=True, share_embeddings_and_output_weights=False,
    )  # fmt: skip
    if dtype != torch.float32:
        gpt = Float16Module(config, gpt)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=dtype != torch.float32)
    model = [DistributedDataParallel(config, ddp, gpt)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=lr, weight_decay=0.0, clip_grad=1.0, params_dtype=dtype, fp16=dtype == torch.float16,
            bf16=dtype == torch.bfloat16, initial_loss_scale=2.0**10,
        ),  # fmt: skip
        model,
    )
    config.grad_scale_func = optimizer.scale_loss
    scheduler = EssParamScheduler(
        optimizer, init_lr=0.0, max_lr=lr, min_lr=lr, lr_warmup_steps=0, lr_decay_steps=1000, lr_decay_style="constant",
        start_wd=0.0, end_wd=0.0, wd_incr_steps=1000, wd_incr_style="constant", ess=ess,
    )  # fmt: skip
    return TinyGPT(model, optimizer, scheduler, groups, config)
