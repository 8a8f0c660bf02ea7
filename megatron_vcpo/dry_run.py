"""--vcpo-dry-run: the resolved configuration, the rank map and a memory estimate, without starting anything."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
from typing import Any

from megatron_vcpo.config import PluginConfig

_MIB = 1 << 20
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MAX_RANKS_SHOWN = 32


def report(args: argparse.Namespace, config: PluginConfig) -> str:
    """The text that a dry run prints; every check has passed by the time it is called.

    Args:
        args: Megatron's arguments after its own checks.
        config: the plugin's, resolved.
    """
    parts = [
        "Every flag was checked; nothing was started.",
        _configuration(config),
        _rank_map(args, config),
        _memory(args, config),
        _schedule(args, config),
    ]
    return "\n\n".join(parts)


def _configuration(config: PluginConfig) -> str:
    lines = ["Resolved configuration:"]
    for prefix in ("vcpo", "rollout", "sync"):
        group: Any = getattr(config, prefix)
        for field in dataclasses.fields(group):
            lines.append(f"  --{prefix}-{field.name.replace('_', '-'):<32} {getattr(group, field.name)}")
    return "\n".join(lines)


def rank_rows(args: argparse.Namespace, config: PluginConfig) -> list[dict[str, int]]:
    """One row for each process: rank, tp, pp, dp, ep, the engine it belongs to and its rank in the engine."""
    from megatron.core.parallel_state import RankGenerator

    tp, pp, ep = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size
    order = "tp-cp-ep-dp-pp" if not args.use_tp_pp_dp_mapping else "tp-cp-ep-pp-dp"
    dp = args.world_size // (tp * pp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order=order)
    expert_tp = args.expert_tensor_parallel_size or tp
    expert_dp = args.world_size // (expert_tp * ep * pp)
    expert = RankGenerator(tp=expert_tp, ep=ep, dp=expert_dp, pp=pp, cp=1, order=order)
    engine = config.rollout.engine_tensor_parallel_size
    rows = [{"rank": rank, "engine": rank // engine, "engine_tp": rank % engine} for rank in range(args.world_size)]
    for name, generator, token in (("tp", dense, "tp"), ("pp", dense, "pp"), ("dp", dense, "dp"), ("ep", expert, "ep")):
        for group in generator.get_ranks(token):
            for place, rank in enumerate(group):
                rows[rank][name] = place
    return rows


def _rank_map(args: argparse.Namespace, config: PluginConfig) -> str:
    columns = ("rank", "tp", "pp", "dp", "ep", "engine", "engine_tp")
    rows = rank_rows(args, config)
    lines = [f"Rank map ({len(rows)} processes):", "  " + " ".join(f"{name:>9}" for name in columns)]
    lines += ["  " + " ".join(f"{row.get(name, 0):>9}" for name in columns) for row in rows[:_MAX_RANKS_SHOWN]]
    if len(rows) > _MAX_RANKS_SHOWN:
        lines.append(f"  ... and {len(rows) - _MAX_RANKS_SHOWN} more in the same order")
    return "\n".join(lines)


def _memory(args: argparse.Namespace, config: PluginConfig) -> str:
    from megatron.training.theoretical_memory_usage import (
        compute_activation_memory,
        compute_activation_memory_without_sp,
        compute_weight_and_optimizer_memory,
    )

    # Megatron's formulas count a micro-batch of seq_length tokens; ours holds the token budget.
    sized = argparse.Namespace(**{**vars(args), "seq_length": config.vcpo.tokens_per_micro_batch})
    with contextlib.redirect_stdout(io.StringIO()):
        state = compute_weight_and_optimizer_memory(sized)
        selective = args.sequence_parallel and args.recompute_granularity == "selective"
        activations = (compute_activation_memory if selective else compute_activation_memory_without_sp)(sized, None)
    dtype = config.rollout.engine_dtype
    bytes_each = _DTYPE_BYTES.get(dtype, 2 if args.bf16 or args.fp16 else 4)
    engine = count_parameters(args) * bytes_each / config.rollout.engine_tensor_parallel_size
    rows = (
        ("trainer weights, gradients, optimizer", state),
        ("trainer activations (no recomputation counted)", activations),
        ("engine weights", engine),
        ("engine key-value cache", float(config.rollout.engine_kv_cache_bytes)),
        ("weight sync staging", 2.0 * config.sync.bucket_bytes),
    )
    lines = ["Memory estimate of the fullest rank, MiB:"]
    lines += [f"  {name:<48} {size / _MIB:>12,.0f}" for name, size in rows]
    lines.append(f"  {'together':<48} {sum(size for _, size in rows) / _MIB:>12,.0f}")
    return "\n".join(lines)


def count_parameters(args: argparse.Namespace) -> int:
    """Parameters of the whole model, norms and biases left out."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    attention = args.hidden_size * args.kv_channels * (2 * args.num_attention_heads + 2 * groups)
    gate = 3 if args.swiglu else 2
    dense = gate * args.hidden_size * args.ffn_hidden_size
    experts = 0
    if args.num_experts:
        experts = gate * args.hidden_size * (args.moe_ffn_hidden_size or args.ffn_hidden_size) * args.num_experts
    pattern = args.moe_layer_freq if isinstance(args.moe_layer_freq, list) else None
    total = 0
    for layer in range(args.num_layers):
        sparse = bool(args.num_experts) and (pattern[layer] if pattern else layer % args.moe_layer_freq == 0)
        total += attention + (experts if sparse else dense)
    embeddings = 2 if args.untie_embeddings_and_output_weights else 1
    return total + embeddings * args.hidden_size * args.padded_vocab_size


def _schedule(args: argparse.Namespace, config: PluginConfig) -> str:
    rollout = config.rollout
    phase = rollout.phase_steps(config.sync.interval)
    trajectories = rollout.prompts_per_step * rollout.responses_per_prompt
    return "\n".join(
        [
            "Flow:",
            f"  {args.train_iters} optimizer steps of {trajectories} trajectories "
            f"({rollout.prompts_per_step} prompts x {rollout.responses_per_prompt} responses)",
            f"  one rollout phase feeds {phase} step(s); tokens older than {rollout.max_lag} steps are refused",
            f"  {args.world_size // rollout.engine_tensor_parallel_size} engine(s) of "
            f"{rollout.engine_tensor_parallel_size} rank(s), weights published every {config.sync.interval} step(s)",
        ]
    )
