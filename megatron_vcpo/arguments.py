"""The dataclasses of `config.py` as argparse groups, defaults for Megatron's own flags, and checks across both."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.training.argument_utils import ArgumentGroupFactory

from megatron_vcpo.config import ConfigError, PluginConfig, RolloutConfig, SyncConfig, VCPOConfig
from megatron_vcpo.mcore.energies.unsupported import require_supported
from megatron_vcpo.mcore.router_replay import refuse_unreplayable
from patches import megatron_cpu, megatron_help_percent

_GROUPS: dict[str, type] = {"vcpo": VCPOConfig, "rollout": RolloutConfig, "sync": SyncConfig}

# What a loop over packed trajectories needs of Megatron; a user's flag still overrides, and is then checked.
MEGATRON_DEFAULTS: dict[str, Any] = {
    "dataloader_type": "external",
    "calculate_per_token_loss": True,
    "micro_batch_size": 1,
    "eval_iters": 0,
    "eval_interval": 1_000_000_000,
    "rerun_mode": "disabled",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_token_dispatcher_type": "alltoall",  # micro-batches may differ in rows; for allgather all are padded alike
    "position_embedding_type": "rope",
    "hysteresis": 1,  # FP16: the trajectories of an overflow are tried again, which needs a lower loss scale at once
}

# What runs on a CPU over gloo.
_CPU_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "check_for_nan_in_loss_and_grad": False,
}


class _PrefixedGroup(ArgumentGroupFactory):
    """Megatron's own dataclass-to-flags helper, with a prefix on flags and destinations."""

    def __init__(self, config_class: type, prefix: str) -> None:
        super().__init__(config_class)
        self.prefix = prefix

    def _build_argparse_kwargs_from_field(self, attribute: dataclasses.Field[Any]) -> dict[str, Any]:
        kwargs = super()._build_argparse_kwargs_from_field(attribute)
        kwargs["arg_names"] = [f"--{self.prefix}-{attribute.name.replace('_', '-')}"]
        kwargs["dest"] = f"{self.prefix}_{attribute.name}"
        text = kwargs["help"].replace("%", "%%")
        kwargs["help"] = text if "Default:" in text else f"{text} Default: {kwargs['default']}."
        return kwargs


def add_vcpo_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the plugin to Megatron's parser (its `extra_args_provider`) and set the defaults it needs."""
    for prefix, config_class in _GROUPS.items():
        _PrefixedGroup(config_class, prefix).build_group(parser, title=f"{prefix} ({config_class.__name__})")
    parser.set_defaults(**MEGATRON_DEFAULTS)
    if megatron_cpu.active():
        parser.set_defaults(**_CPU_DEFAULTS)
    megatron_help_percent.apply(parser)
    return parser


def plugin_config_from_args(args: argparse.Namespace) -> PluginConfig:
    """The three dataclasses, filled from parsed flags and not yet checked."""
    groups = {
        prefix: config_class(
            **{field.name: getattr(args, f"{prefix}_{field.name}") for field in dataclasses.fields(config_class)}
        )
        for prefix, config_class in _GROUPS.items()
    }
    return PluginConfig(**groups)


def resolve(args: argparse.Namespace, config: PluginConfig) -> None:
    """Check flags against each other before Megatron's own checks, and fill in what follows from them.

    Raises:
        ConfigError: one sentence that names the flag to change.
    """
    config.validate()
    rollout = config.rollout
    _require_megatron_flags(args)
    if config.vcpo.energy == "exact":
        require_supported(args)
    trajectories = rollout.prompts_per_step * rollout.responses_per_prompt
    if args.global_batch_size is None:
        args.global_batch_size = trajectories
    elif args.global_batch_size != trajectories:
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} must be --rollout-prompts-per-step x "
            f"--rollout-responses-per-prompt = {trajectories}; drop it to have it set."
        )
    dp_size = _data_parallel_size(args)
    if trajectories % dp_size:
        raise ConfigError(
            f"{trajectories} trajectories a step (--rollout-prompts-per-step {rollout.prompts_per_step} x "
            f"--rollout-responses-per-prompt {rollout.responses_per_prompt}) do not divide over {dp_size} "
            "data-parallel ranks; change one of the two."
        )
    engine = rollout.engine_tensor_parallel_size
    if args.world_size % engine:
        raise ConfigError(
            f"--rollout-engine-tensor-parallel-size {engine} must divide the number of processes ({args.world_size})."
        )
    if args.num_attention_heads % engine:
        raise ConfigError(
            f"--rollout-engine-tensor-parallel-size {engine} must divide --num-attention-heads "
            f"{args.num_attention_heads}."
        )
    if config.vcpo.phase_deadline is None:
        config.vcpo.phase_deadline = 0.9 * 60.0 * args.distributed_timeout_minutes
    _check_routers(args, config)
    _resolve_lengths(args, config)
    _resolve_staleness(config)
    _resolve_files(args, config)


def _data_parallel_size(args: argparse.Namespace) -> int:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context = args.context_parallel_size
    if min(tensor, pipeline, context) < 1 or args.world_size % (tensor * pipeline * context):
        raise ConfigError(
            f"{args.world_size} processes do not divide into model-parallel groups of --tensor-model-parallel-size "
            f"{tensor} x --pipeline-model-parallel-size {pipeline} x --context-parallel-size {context}; change one of "
            "them or the number of processes."
        )
    return int(args.world_size // (tensor * pipeline * context))


def _require_megatron_flags(args: argparse.Namespace) -> None:
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


def _check_routers(args: argparse.Namespace, config: PluginConfig) -> None:
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


def _is_interleaved(args: argparse.Namespace) -> bool:
    return (
        args.num_layers_per_virtual_pipeline_stage is not None
        or args.num_virtual_stages_per_pipeline_rank is not None
        or "|" in str(args.pipeline_model_parallel_layout or "")
    )


def _resolve_lengths(args: argparse.Namespace, config: PluginConfig) -> None:
    rollout = config.rollout
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    limit = args.max_position_embeddings
    if rollout.max_response_length >= min(args.seq_length, limit):
        raise ConfigError(
            f"--rollout-max-response-length {rollout.max_response_length} leaves no room for a prompt: "
            f"--seq-length is {args.seq_length} and --max-position-embeddings {limit}."
        )
    if rollout.max_prompt_length is None:
        rollout.max_prompt_length = min(args.seq_length, limit) - rollout.max_response_length
    longest = rollout.max_prompt_length + rollout.max_response_length
    if longest > limit:
        raise ConfigError(
            f"--rollout-max-prompt-length {rollout.max_prompt_length} + --rollout-max-response-length "
            f"{rollout.max_response_length} exceed the model's limit, --max-position-embeddings {limit}."
        )
    if config.vcpo.tokens_per_micro_batch is None:
        config.vcpo.tokens_per_micro_batch = max(args.seq_length, longest)
    if longest > config.vcpo.tokens_per_micro_batch:
        raise ConfigError(
            f"--vcpo-tokens-per-micro-batch {config.vcpo.tokens_per_micro_batch} is less than the longest trajectory, "
            f"--rollout-max-prompt-length + --rollout-max-response-length = {longest}."
        )


def _resolve_staleness(config: PluginConfig) -> None:
    rollout, interval = config.rollout, config.sync.interval
    phase = rollout.phase_steps(interval)
    if phase < 1:
        raise ConfigError("--rollout-steps-per-phase must be at least 1.")
    oldest = (interval - 1) // phase * phase + phase - 1 if interval > 1 else phase - 1
    if oldest > rollout.max_lag:
        raise ConfigError(
            f"--sync-interval {interval} with {phase} step(s) per rollout phase trains on tokens up to {oldest} steps "
            f"old, but --rollout-max-lag is {rollout.max_lag} and they would all be refused; raise --rollout-max-lag "
            "or lower one of the two."
        )


def _resolve_files(args: argparse.Namespace, config: PluginConfig) -> None:
    rollout = config.rollout
    if rollout.tokenizer is None:
        rollout.tokenizer = args.tokenizer_model
    if rollout.tokenizer is None:
        raise ConfigError(
            "--rollout-tokenizer (or --tokenizer-type HuggingFaceTokenizer --tokenizer-model) must name the "
            "tokenizer's folder."
        )
    if not (Path(rollout.tokenizer) / "tokenizer_config.json").is_file():
        raise ConfigError(f"--rollout-tokenizer {rollout.tokenizer}: no tokenizer_config.json in that folder.")
    if rollout.seed is None:
        rollout.seed = args.seed
    if config.vcpo.load_hf is not None and not (Path(config.vcpo.load_hf) / "config.json").is_file():
        raise ConfigError(f"--vcpo-load-hf {config.vcpo.load_hf}: no config.json in that folder.")
    if args.load is not None and not _holds_checkpoint(args):
        args.load = None
    for flag, folder in (("--save", args.save), ("--rollout-run-dir", rollout.run_dir)):
        if folder is not None:
            _require_writable(Path(folder), flag, create=not config.vcpo.dry_run)
    if args.save is not None and args.save_interval is None:
        raise ConfigError("--save needs --save-interval (optimizer steps between two checkpoints).")
    args.dataloader_save = args.save


def _holds_checkpoint(args: argparse.Namespace) -> bool:
    """False where --load names the folder of a run that is yet to begin; ConfigError on anything else unreadable.

    Megatron would go on with random weights, or exit with code 0.
    """
    folder, tracker = Path(args.load), Path(args.load) / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        if args.load == args.save:
            return False
        raise ConfigError(
            f"--load {folder}: no checkpoint there (no latest_checkpointed_iteration.txt); correct the path or drop it."
        )
    try:
        name = tracker.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--load {folder}: {tracker.name} cannot be read ({error}).") from error
    if args.ckpt_step is not None:
        name = str(args.ckpt_step)
    if name != "release" and not name.isdecimal():
        raise ConfigError(f"--load {folder}: {tracker.name} holds {name[:40]!r} and not the number of an iteration.")
    checkpoint = folder / (name if name == "release" else f"iter_{int(name):07d}")
    if not checkpoint.is_dir() or not any(checkpoint.iterdir()):
        raise ConfigError(
            f"--load {folder}: the checkpoint {checkpoint.name} that {tracker.name} names is missing or empty; write "
            "the number of one that is there into that file, or choose another folder."
        )
    return True


def _require_writable(folder: Path, flag: str, *, create: bool) -> None:
    """The folder, or the nearest one above it that exists, can be written to."""
    if create:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag} {folder}: cannot create the folder ({error.strerror}).") from error
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{flag} {folder}: {existing} is not a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {folder}: the folder {existing} is not writable.")


def parse(adjust: Callable[[PluginConfig], None] | None = None) -> tuple[argparse.Namespace, PluginConfig]:
    """Parse the command line and make the checks that are the plugin's own.

    Args:
        adjust: changes the settings before they are checked.

    Raises:
        ConfigError: anything that cannot work.
    """
    from megatron.training.arguments import parse_args

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        # The generated usage, printed before every complaint of argparse, is a thousand flags long.
        parser.usage = "%(prog)s <Megatron's flags> --vcpo-... --rollout-... --sync-... (--help explains each)"
        return add_vcpo_args(parser)

    args = parse_args(extra_args_provider=provider)
    config = plugin_config_from_args(args)
    if adjust is not None:
        adjust(config)
    if config.vcpo.dry_run and config.vcpo.dry_run_processes is not None:
        args.world_size = config.vcpo.dry_run_processes
    resolve(args, config)
    return args, config


def finish(args: argparse.Namespace, config: PluginConfig, vocab_size: int) -> None:
    """Run Megatron's own checks and make the arguments its global ones (not in a dry run).

    Raises:
        ConfigError: Megatron refuses the flags; its words are in the message.
    """
    from megatron.training.arguments import validate_args
    from megatron.training.global_vars import set_global_variables

    args.vocab_size = vocab_size
    if args.padded_vocab_size is None:
        # Megatron would pad the tokenizer's vocabulary, which may be smaller than the checkpoint's embedding.
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-vocab_size // multiple) * multiple
    if args.tokenizer_type is None:
        args.tokenizer_type, args.tokenizer_model = "HuggingFaceTokenizer", config.rollout.tokenizer
    # It prints every argument that there is; a dry run prints its report instead.
    silence = contextlib.redirect_stdout(io.StringIO()) if config.vcpo.dry_run else contextlib.nullcontext()
    try:
        with silence:
            validate_args(args, {})
    except (AssertionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"Megatron refuses these flags: {_reason(error)}.") from error
    # validate_args sets it to False, and there is no flag. For allgather every micro-batch has the same rows instead.
    args.variable_seq_lengths = not (args.num_experts and args.moe_token_dispatcher_type == "allgather")
    if not config.vcpo.dry_run:
        set_global_variables(args)


def _reason(error: BaseException) -> str:
    """The words of an assertion, or the assertion itself where it has none."""
    if str(error):
        return " ".join(str(error).split()).rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line}" if frames else type(error).__name__
