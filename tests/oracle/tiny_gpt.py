"""A Llama-type GPTModel with Megatron's optimizer on one process, and one step of a loop over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

VOCAB, PADDED_VOCAB, SEQUENCE = 60, 64, 48


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the model."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    query_groups: int = 2
    ffn: int = 64
    vocab: int = PADDED_VOCAB
    experts: int = 0


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


def transformer_config(size: Size, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Megatron-Core's config for a CPU; `overrides` are its fields."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": size.layers, "hidden_size": size.hidden, "num_attention_heads": size.heads,
        "num_query_groups": size.query_groups, "ffn_hidden_size": size.ffn, "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False, "bias_dropout_fusion": False, "masked_softmax_fusion": False,
        "persist_layer_norm": False, "apply_rope_fusion": False, "bias_activation_fusion": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_token_dispatcher_type": "alltoall",
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False, "calculate_per_token_loss": True, "variable_seq_lengths": True,
        "params_dtype": dtype, "pipeline_dtype": dtype, "fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16,
    }  # fmt: skip
    if size.experts:
        fields |= {
            "num_moe_experts": size.experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 32,
            "moe_router_load_balancing_type": "none",
        }
    return TransformerConfig(**{**fields, **overrides})


def build_tiny_gpt(
    groups: Any,
    *,
    size: Size | None = None,
    lr: float = 1e-2,
    seed: int = 0,
    params_dtype: torch.dtype = torch.float32,
    sequence: int = SEQUENCE,
    ess: Any = None,
    distributed_optimizer: bool = False,
    before_wrap: Callable[[list[Any]], Any] | None = None,
    **overrides: Any,
) -> TinyGPT:
    """The model of the given size and seed, its optimizer and scheduler; fp32 unless `params_dtype` says otherwise."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from megatron_vcpo.optim import EssParamScheduler
    from megatron_vcpo.patches.cpu_packed_attention import PackedCoreAttention

    size = size or Size()
    config = transformer_config(size, params_dtype, **overrides)
    spec = get_gpt_layer_local_spec(num_experts=size.experts or None, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    torch.manual_seed(seed)
    gpt: Any = GPTModel(
        config,
        spec,
        vocab_size=size.vocab,
        max_sequence_length=sequence,
        position_embedding_type="rope",
        parallel_output=True,
        share_embeddings_and_output_weights=False,
    )
    if params_dtype != torch.float32:
        gpt = Float16Module(config, gpt)
    if before_wrap is not None:
        before_wrap([gpt])
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=params_dtype != torch.float32, use_distributed_optimizer=distributed_optimizer
    )
    model = [DistributedDataParallel(config, ddp, gpt)]
    half = {"fp16": params_dtype == torch.float16, "bf16": params_dtype == torch.bfloat16, "params_dtype": params_dtype}
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        weight_decay=0.0,
        clip_grad=1.0,
        initial_loss_scale=2.0**10,
        use_distributed_optimizer=distributed_optimizer,
        **half,
    )
    optimizer = get_megatron_optimizer(optimizer_config, model)
    config.grad_scale_func = optimizer.scale_loss
    rates = {"init_lr": 0.0, "max_lr": lr, "min_lr": lr, "lr_warmup_steps": 0, "lr_decay_steps": 1000}
    decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 1000, "wd_incr_style": "constant"}
    scheduler = EssParamScheduler(optimizer, lr_decay_style="constant", ess=ess, **rates, **decay)
    return TinyGPT(model, optimizer, scheduler, groups, config)


def optimizer_step(
    model: list[Any], optimizer: Any, forward_step: Callable[..., Any], micro_batches: Sequence[Any], sequence: int
) -> tuple[bool, Any, torch.Tensor]:
    """Forward, backward, finalization and update: (success, gradient norm, gradients before the update, flat)."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=sequence,
        micro_batch_size=1,
        forward_only=False,
    )
    trained = [p for chunk in model for p in chunk.parameters() if p.requires_grad]
    gradient = torch.cat([p.main_grad.flatten() for p in trained])
    success, grad_norm, _ = optimizer.step()
    return success, grad_norm, gradient
