"""Megatron's own flags: what a loop over packed trajectories needs of them, in one sentence each."""

from __future__ import annotations

import argparse
import math
import traceback

from megatron_vcpo.config import ConfigError, PluginConfig
from megatron_vcpo.mcore.routers.replay import refuse_unreplayable


def data_parallel_size(args: argparse.Namespace) -> int:
    """Data-parallel ranks. Raises ConfigError where the processes do not divide into model-parallel groups."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context = args.context_parallel_size
    if min(tensor, pipeline, context) < 1 or args.world_size % (tensor * pipeline * context):
        raise ConfigError(
            f"{args.world_size} processes do not divide into model-parallel groups of --tensor-model-parallel-size "
            f"{tensor} x --pipeline-model-parallel-size {pipeline} x --context-parallel-size {context}; change one of "
            "them or the number of processes."
        )
    _check_expert_groups(args)
    return int(args.world_size // (tensor * pipeline * context))


def _check_expert_groups(args: argparse.Namespace) -> None:
    experts, pipeline = args.expert_model_parallel_size, args.pipeline_model_parallel_size
    tensor = args.tensor_model_parallel_size
    if args.expert_tensor_parallel_size is not None:
        tensor = args.expert_tensor_parallel_size
    if min(experts, tensor) < 1 or args.world_size % (experts * tensor * pipeline):
        raise ConfigError(
            f"{args.world_size} processes do not divide into groups of --expert-model-parallel-size {experts} x "
            f"--expert-tensor-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline}; change one of them "
            "or the number of processes."
        )


def require_megatron_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError on a flag that cannot work here, or over which Megatron would stumble without a word."""
    needed = (
        ("dataloader_type", "external", "--dataloader-type"),
        ("calculate_per_token_loss", True, "--calculate-per-token-loss"),
        ("micro_batch_size", 1, "--micro-batch-size"),
        ("rerun_mode", "disabled", "--rerun-mode"),
        ("hidden_dropout", 0.0, "--hidden-dropout"),
        ("attention_dropout", 0.0, "--attention-dropout"),
        ("eval_iters", 0, "--eval-iters"),
    )
    for name, value, flag in needed:
        actual = getattr(args, name)
        if actual != value:
            hint = " (evaluation is --rollout-eval-interval)" if name == "eval_iters" else ""
            raise ConfigError(f"{flag} must be {value}, not {actual}: drop the flag{hint}.")
    if args.moe_token_dispatcher_type not in ("alltoall", "allgather"):
        raise ConfigError(
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type} is not tried with packed sequences; use "
            "alltoall (the default here) or allgather."
        )
    if args.distributed_backend == "gloo" and not args.overlap_p2p_comm and _is_interleaved(args):
        raise ConfigError(
            "--no-overlap-p2p-communication with an interleaved pipeline gives wrong gradients over gloo; drop it."
        )
    if args.rampup_batch_size is not None:
        raise ConfigError("--rampup-batch-size cannot work: the batch is what the rollouts give; drop it.")
    for name in ("log_interval", "make_vocab_size_divisible_by", "distributed_timeout_minutes"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}.")
    if args.perform_rl_step:
        raise ConfigError("--perform-rl-step is Megatron's own reinforcement learning; drop it.")
    if args.kv_channels is not None and args.kv_channels % 2:
        raise ConfigError(f"--kv-channels {args.kv_channels} is odd: rotary embeddings turn pairs; give an even size.")
    required = (
        ("train_iters", "optimizer steps"),
        ("seq_length", "tokens of a prompt and its response, at most"),
        ("num_layers", "layers of the model"),
        ("hidden_size", "width of the model"),
        ("num_attention_heads", "query heads of a layer"),
        ("lr", "peak learning rate"),
    )
    for name, meaning in required:
        value, flag = getattr(args, name), "--" + name.replace("_", "-")
        if value is None:
            raise ConfigError(f"{flag} ({meaning}) is required.")
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{flag} ({meaning}) must be a positive number, not {value}.")
    for name, value in vars(args).items():
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"--{name.replace('_', '-')} must be a number, not nan.")


def check_routers(args: argparse.Namespace, config: PluginConfig) -> None:
    """Raise ConfigError on settings of experts that cannot work."""
    if args.num_experts:
        _check_experts(args)
    asked = {
        f"--rollout-router-replay {config.rollout.router_replay}": config.rollout.router_replay != "off",
        "--vcpo-freeze-router": config.vcpo.freeze_router,
        "--vcpo-freeze-expert-bias": config.vcpo.freeze_expert_bias,
    }
    for flag, present in asked.items():
        if present and not args.num_experts:
            raise ConfigError(f"{flag} needs a mixture of experts (--num-experts); drop it for a dense model.")
    if config.vcpo.freeze_expert_bias and not args.moe_router_enable_expert_bias:
        raise ConfigError("--vcpo-freeze-expert-bias needs --moe-router-enable-expert-bias; drop it.")
    if config.rollout.router_replay != "off":
        refuse_unreplayable(args)


def _check_experts(args: argparse.Namespace) -> None:
    if not 1 <= args.moe_router_topk <= args.num_experts:
        raise ConfigError(
            f"--moe-router-topk {args.moe_router_topk} must lie between 1 and --num-experts {args.num_experts}."
        )
    frequency = args.moe_layer_freq
    if isinstance(frequency, int) and frequency < 1:
        raise ConfigError(f"--moe-layer-freq {frequency} must be at least 1, or a list with a 0 or 1 for each layer.")
    if isinstance(frequency, list) and not any(frequency):
        raise ConfigError("--moe-layer-freq leaves no layer with experts; drop --num-experts for a dense model.")


def _is_interleaved(args: argparse.Namespace) -> bool:
    return (
        args.num_layers_per_virtual_pipeline_stage is not None
        or args.num_virtual_stages_per_pipeline_rank is not None
        or "|" in str(args.pipeline_model_parallel_layout or "")
    )


def reason(error: BaseException) -> str:
    """The words of an assertion, or the assertion itself where it has none."""
    if str(error):
        return " ".join(str(error).split()).rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line}" if frames else type(error).__name__
