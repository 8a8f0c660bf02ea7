"""--vcpo-dry-run: the resolved configuration, the rank map and a memory estimate, without starting anything."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from megatron_vcpo.config import PluginConfig
from megatron_vcpo.data.routes import route_dtype
from megatron_vcpo.launch.idle_flags import idle_flags
from megatron_vcpo.objective.corrections import CORRECTIONS
from megatron_vcpo.rollout.stopping import describe_stops
from megatron_vcpo.sync.verify import default_tolerance

_GIB = 1 << 30
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MAX_RANKS_SHOWN = 32
_RANK_COLUMNS = ("rank", "tp", "pp", "cp", "dp", "ep", "engine", "engine_tp")
_WIDTH = 38


def report(args: argparse.Namespace, config: PluginConfig, tokenizer: Any | None = None) -> str:
    """The text that a dry run prints; every check has passed by the time it is called.

    Args:
        args: Megatron's arguments after its own checks.
        config: the plugin's, resolved.
        tokenizer: to show stop tokens by their text.
    """
    parts = [
        "VCPO dry run: every flag was checked, nothing was started.",
        _model(args, config),
        _flow(args, config, tokenizer),
        _configuration(args, config),
        _rank_map(args, config),
        _memory(args, config),
        _notes(args, config),
    ]
    return "\n\n".join(part for part in parts if part)


def _section(title: str, rows: list[tuple[str, object]]) -> str:
    return "\n".join([title, *(f"  {name:<{_WIDTH}} {value}" for name, value in rows)])


def _model(args: argparse.Namespace, config: PluginConfig) -> str:
    counts, padding = count_parameters(args), args.padded_vocab_size - args.vocab_size
    rows: list[tuple[str, object]] = [
        ("parameters", f"{counts.total - counts.tables * args.hidden_size * padding:,}"),
        ("layers x hidden, feed-forward", f"{args.num_layers} x {args.hidden_size:,}, {args.ffn_hidden_size:,}"),
        _heads(args),
        ("vocabulary, padded", f"{args.vocab_size:,}, {args.padded_vocab_size:,}"),
    ]
    if args.num_experts:
        rows.append(("experts, chosen for each token", f"{args.num_experts}, {args.moe_router_topk}"))
        rows.append(("layers with experts", f"{_sparse_layers(args)} of {args.num_layers}"))
    rows += [
        ("trainer's data type", str(args.params_dtype).removeprefix("torch.")),
        ("layers from", args.transformer_impl),
        ("initial weights", args.load or config.vcpo.load_hf or "random"),
    ]
    return _section("Model", rows)


def _heads(args: argparse.Namespace) -> tuple[str, str]:
    if args.multi_latent_attention:
        sizes = (args.num_attention_heads, args.q_lora_rank or "none", args.kv_lora_rank, args.qk_pos_emb_head_dim)
        return "heads, latents of q, of k and v", "{}, {}, {} + {} rotated".format(*sizes)
    return "heads, key-value heads, head size", f"{args.num_attention_heads}, {_kv_heads(args)}, {args.kv_channels}"


def _flow(args: argparse.Namespace, config: PluginConfig, tokenizer: Any | None) -> str:
    rollout, interval = config.rollout, config.sync.interval
    prompts, responses = rollout.prompts_per_step, rollout.responses_per_prompt
    staleness = config.staleness
    phase = staleness.steps_per_phase
    every = f"every {rollout.eval_interval} steps on {rollout.eval_num_prompts} prompts"
    rows: list[tuple[str, object]] = [
        ("optimizer steps", args.train_iters),
        ("trajectories a step", f"{prompts * responses} ({prompts} prompts x {responses} responses)"),
        ("steps fed by one rollout phase", f"{phase} ({phase * prompts * responses:,} trajectories)"),
        ("age of the oldest token, at most", f"{staleness.max_lag} steps; older trajectories are refused"),
        ("weights published", f"every {interval} step(s), before a rollout phase"),
        ("prompt + response, at most", f"{rollout.max_prompt_length} + {rollout.max_response_length} tokens"),
        ("a response ends at", describe_stops(rollout, tokenizer)),
        ("tokens of a micro-batch, at most", f"{config.vcpo.tokens_per_micro_batch:,}"),
        ("learning rate", _learning_rate(args, config)),
        ("evaluation", every if rollout.eval_interval else "none"),
    ]
    return _section("Flow", rows)


def _learning_rate(args: argparse.Namespace, config: PluginConfig) -> str:
    vcpo = config.vcpo
    if vcpo.ess_scaling == "off":
        return f"{args.lr:g} ({args.lr_decay_style})"
    power = {"sqrt": "^(1/2)", "linear": ""}[vcpo.ess_scaling]
    scale = f"(rho / {vcpo.ess_reference}){power}, rho from {vcpo.ess_weights} weights"
    return f"{args.lr:g} ({args.lr_decay_style}) x {scale}"


def _configuration(args: argparse.Namespace, config: PluginConfig) -> str:
    implied = _implied(args, config)
    lines = ["Resolved configuration"]
    for prefix in ("vcpo", "rollout", "sync"):
        group: Any = getattr(config, prefix)
        for field in dataclasses.fields(group):
            flag, value = f"--{prefix}-{field.name}".replace("_", "-"), getattr(group, field.name)
            value = implied.get(flag) if value is None or value == "auto" else value
            text = "-" if value is None or value == [] else " ".join(str(value).split())
            lines.append(f"  {flag:<{_WIDTH}} {text}")
    return "\n".join(lines)


def _implied(args: argparse.Namespace, config: PluginConfig) -> dict[str, object]:
    """What the run takes for a flag that was left to it."""
    correction, rollout = CORRECTIONS[config.vcpo.correction], config.rollout
    dtype = rollout.engine_dtype_of(args.params_dtype)
    quantized = rollout.engine_quantization is not None
    return {
        "--vcpo-correction-lower": correction.lower,
        "--vcpo-correction-upper": correction.upper,
        "--vcpo-ess-reference": "auto",  # known after the first steps
        "--vcpo-dry-run-processes": args.world_size,
        "--rollout-steps-per-phase": config.staleness.steps_per_phase,
        "--rollout-engine-dtype": dtype,
        "--rollout-run-dir": args.save or "runs/<date-time>",
        "--sync-verify-tolerance": default_tolerance(getattr(torch, dtype), quantized=quantized),
    }


# ---------------------------------------------------------------------- ranks


def rank_rows(args: argparse.Namespace, config: PluginConfig) -> list[dict[str, int]]:
    """One row for each process: rank, tp, pp, cp, dp, ep, the engine it belongs to and its rank in the engine.

    The generators are those of Megatron-Core's parallel_state.initialize_model_parallel().
    """
    from megatron.core.parallel_state import RankGenerator

    tp, pp, ep = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size
    cp = args.context_parallel_size
    order = "tp-cp-ep-dp-pp" if not args.use_tp_pp_dp_mapping else "tp-cp-ep-pp-dp"
    expert_tp = args.expert_tensor_parallel_size or tp
    dense = RankGenerator(tp=tp, ep=1, dp=args.world_size // (tp * pp * cp), pp=pp, cp=cp, order=order)
    expert_dp = args.world_size // (expert_tp * ep * pp)
    expert = RankGenerator(tp=expert_tp, ep=ep, dp=expert_dp, pp=pp, cp=1, order=order)
    engine = config.rollout.engine_tensor_parallel_size
    rows = [{"rank": rank, "engine": rank // engine, "engine_tp": rank % engine} for rank in range(args.world_size)]
    for name, generator in (("tp", dense), ("pp", dense), ("cp", dense), ("dp", dense), ("ep", expert)):
        for group in generator.get_ranks(name):
            for place, rank in enumerate(group):
                rows[rank][name] = place
    return rows


def _rank_map(args: argparse.Namespace, config: PluginConfig) -> str:
    rows = rank_rows(args, config)
    size = config.rollout.engine_tensor_parallel_size
    engines = f"{len(rows) // size} engine{'s' * (len(rows) > size)} of {size} rank{'s' * (size > 1)}"
    lines = [
        f"Rank map ({len(rows)} processes, {engines})",
        "  " + " ".join(f"{name:>9}" for name in _RANK_COLUMNS),
    ]
    lines += ["  " + " ".join(f"{row[name]:>9}" for name in _RANK_COLUMNS) for row in rows[:_MAX_RANKS_SHOWN]]
    if len(rows) > _MAX_RANKS_SHOWN:
        lines.append(f"  ... and {len(rows) - _MAX_RANKS_SHOWN} more in the same order")
    return "\n".join(lines)


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameters of the whole model, by how they are spread over ranks."""

    embedding: int  # one table; there are two where the output layer is untied
    tables: int
    layers: int  # all layers without their experts, and the last norm
    experts: int

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return self.tables * self.embedding + self.layers + self.experts


def count_parameters(args: argparse.Namespace) -> ParameterCounts:
    """Count the parameters of a model of one of the known families from Megatron's arguments.

    The biases of auxiliary-loss-free balancing are counted, which nothing trains by gradients: checkpoints hold them.
    """
    hidden = args.hidden_size
    gate = 3 if args.swiglu else 2
    attention = _latent_parameters(args) if args.multi_latent_attention else _attention_parameters(args)
    sparse = _sparse_layers(args)
    layers = args.num_layers * (attention + 2 * hidden) + hidden
    layers += (args.num_layers - sparse) * gate * hidden * args.ffn_hidden_size
    experts = 0
    if sparse:
        router = args.num_experts * (hidden + int(args.moe_router_enable_expert_bias))
        layers += sparse * (router + gate * hidden * (args.moe_shared_expert_intermediate_size or 0))
        experts = sparse * gate * hidden * (args.moe_ffn_hidden_size or args.ffn_hidden_size) * args.num_experts
    return ParameterCounts(
        embedding=hidden * args.padded_vocab_size,
        tables=2 if args.untie_embeddings_and_output_weights else 1,
        layers=layers,
        experts=experts,
    )


def _kv_heads(args: argparse.Namespace) -> int:
    return int(args.num_query_groups if args.group_query_attention else args.num_attention_heads)


def _attention_parameters(args: argparse.Namespace) -> int:
    """Of one layer with multi-head attention."""
    hidden, head = args.hidden_size, args.kv_channels
    qkv = head * (args.num_attention_heads + 2 * _kv_heads(args))
    count = hidden * qkv + hidden * head * args.num_attention_heads
    count += qkv if args.add_qkv_bias else 0
    return int(count + (2 * head if args.qk_layernorm else 0))


def _latent_parameters(args: argparse.Namespace) -> int:
    """Of one layer with multi-latent attention; the norms stand behind the latents."""
    hidden, heads, key_value = args.hidden_size, args.num_attention_heads, args.kv_lora_rank
    query = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    low = args.q_lora_rank
    count = low * (hidden + query + int(args.qk_layernorm)) if low else hidden * query
    count += hidden * (key_value + args.qk_pos_emb_head_dim) + (key_value if args.qk_layernorm else 0)
    count += key_value * heads * (args.qk_head_dim + args.v_head_dim)
    return int(count + heads * args.v_head_dim * hidden)


def _sparse_layers(args: argparse.Namespace) -> int:
    if not args.num_experts:
        return 0
    if isinstance(args.moe_layer_freq, list):
        return sum(bool(flag) for flag in args.moe_layer_freq)
    return len(range(0, args.num_layers, args.moe_layer_freq))


def _state_bytes(args: argparse.Namespace) -> float:
    """Weights, gradients and optimizer state of the rank that holds most: a pipeline's first or last."""
    counts = count_parameters(args)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    tables = counts.tables if pp == 1 else 1
    stage = -(-args.num_layers // pp) / args.num_layers  # share of the layers on the fullest stage
    dense = (counts.layers * stage + tables * counts.embedding) / tp
    expert_ranks = (args.expert_tensor_parallel_size or tp) * args.expert_model_parallel_size
    half = args.bf16 or args.fp16
    gradient = 2 if half and not args.accumulate_allreduce_grads_in_fp32 else 4
    kept = (2 if half else 4) + gradient
    sharded = 12 if half else 8  # fp32 copy (of half precision only) and two moments

    def size(parameters: float, replicas: int) -> float:
        return parameters * (kept + sharded / (replicas if args.use_distributed_optimizer else 1))

    return size(dense, args.world_size // (tp * pp)) + size(
        counts.experts * stage / expert_ranks, args.world_size // (expert_ranks * pp)
    )


def _activation_bytes(args: argparse.Namespace, config: PluginConfig) -> float:
    """Layers' activations of one micro-batch, times those in flight in a pipeline.

    After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), table
    2, for an attention that keeps no scores.
    """
    tp = args.tensor_model_parallel_size
    tokens = float(config.vcpo.tokens_per_micro_batch or args.seq_length) / args.context_parallel_size
    width = 2 if args.bf16 or args.fp16 else 4
    ffn = args.ffn_hidden_size
    if args.num_experts:
        ffn = args.moe_router_topk * (args.moe_ffn_hidden_size or args.ffn_hidden_size)
        ffn += args.moe_shared_expert_intermediate_size or 0
    key, value = args.kv_channels, args.kv_channels
    if args.multi_latent_attention:
        key, value = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    # Bytes per token and hidden unit, in half precision: queries and keys, values and the attention's result, MLP.
    split = 4.0 * (args.num_attention_heads * (key + value) + ffn) / args.hidden_size
    shared = 10.0
    layer = (shared / (tp if args.sequence_parallel else 1) + split / tp) * tokens * args.hidden_size * width / 2
    kept = tokens * args.hidden_size * width / (tp if args.sequence_parallel else 1)
    layers = args.num_layers  # of 1/pp of them for pp micro-batches in flight
    return layers * kept + layer if args.recompute_granularity == "full" else layers * layer


def _logit_bytes(args: argparse.Namespace, config: PluginConfig) -> float:
    """Logits of a chunk in the trainer's type, in fp32, and their gradient in fp32."""
    tokens = float(config.vcpo.tokens_per_micro_batch or args.seq_length) / args.context_parallel_size
    tokens = min(tokens, config.vcpo.logit_chunk or tokens)
    width = 2 if args.bf16 or args.fp16 else 4
    return float(tokens * args.padded_vocab_size / args.tensor_model_parallel_size * (width + 8))


def _engine_bytes(args: argparse.Namespace, config: PluginConfig) -> int:
    dtype = config.rollout.engine_dtype
    return _DTYPE_BYTES.get(dtype, 2 if args.bf16 or args.fp16 else 4)


def cache_tokens(args: argparse.Namespace, config: PluginConfig) -> int:
    """Tokens that fit into the key-value cache of one engine rank."""
    if args.multi_latent_attention:  # every rank keeps the latents whole
        width = args.kv_lora_rank + args.qk_pos_emb_head_dim
    else:
        width = 2 * max(1, _kv_heads(args) // config.rollout.engine_tensor_parallel_size) * args.kv_channels
    return int(config.rollout.engine_kv_cache_bytes // (args.num_layers * width * _engine_bytes(args, config)))


def _memory(args: argparse.Namespace, config: PluginConfig) -> str:
    engine = config.rollout.engine_tensor_parallel_size
    longest = int(config.rollout.max_prompt_length or 0) + config.rollout.max_response_length
    cached = cache_tokens(args, config)
    width = 1 if config.rollout.engine_quantization else _engine_bytes(args, config)
    rows = [
        ("trainer: weights, gradients, optimizer", _state_bytes(args)),
        ("trainer: activations of the layers", _activation_bytes(args, config)),
        ("trainer: logits", _logit_bytes(args, config)),
        ("engine: weights", count_parameters(args).total * width / engine),
        ("engine: key-value cache", float(config.rollout.engine_kv_cache_bytes)),
        ("weight sync: two buckets", 2.0 * config.sync.bucket_bytes),
    ]
    rows.append(("together", sum(size for _, size in rows)))
    lines = ["Memory of the fullest rank, estimated, GiB"]
    lines += [f"  {name:<{_WIDTH}} {size / _GIB:>8.2f}" for name, size in rows]
    lines.append(f"  The cache holds {cached:,} tokens: {cached // longest:,} of the longest sequences at a time.")
    waiting = waiting_bytes(args, config) / _GIB
    if waiting >= 0.5:
        lines.append(f"  Every process keeps up to {waiting:.1f} GiB of waiting trajectories in the host's memory.")
    return "\n".join(lines)


def waiting_bytes(args: argparse.Namespace, config: PluginConfig) -> int:
    """Trajectories of a whole phase, all of the greatest length: every process holds all of them."""
    rollout = config.rollout
    trajectories = config.staleness.steps_per_phase * rollout.prompts_per_step * rollout.responses_per_prompt
    prompt, response = int(rollout.max_prompt_length or 0), rollout.max_response_length
    routes = 0
    if rollout.router_replay != "off":
        routes = _sparse_layers(args) * args.moe_router_topk
        routes *= route_dtype(args.num_experts, args.moe_router_topk).itemsize
    return trajectories * ((prompt + response) * (4 + routes) + response * 9)  # log-probs, versions and the mask


def _notes(args: argparse.Namespace, config: PluginConfig) -> str:
    notes = idle_flags(args, config)
    if args.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        notes.append("Transformer Engine is not installed here; the run needs it (pip install -e '.[gpu]').")
    if args.distributed_backend == "nccl" and not torch.cuda.is_available():
        notes.append("There is no CUDA device here; the run needs one for each process.")
    if config.vcpo.kl_coefficient > 0.0:
        notes.append("The KL reference is kept in host memory: the trainer's weights of this rank once more.")
    return "\n".join(["Notes", *(f"  {note}" for note in notes)]) if notes else ""
