"""The dataclasses of `config/` as argparse groups, defaults for Megatron's own flags, and checks across both."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.training.argument_utils import ArgumentGroupFactory

from megatron_vcpo.checkpoint.save_folder import check_folders
from megatron_vcpo.config import ConfigError, PluginConfig, RolloutConfig, SyncConfig, VCPOConfig
from megatron_vcpo.launch.idle_flags import idle_flags
from megatron_vcpo.launch.megatron_flags import check_routers, data_parallel_size, reason, require_megatron_flags
from megatron_vcpo.mcore.energies.unsupported import require_supported
from megatron_vcpo.patches import megatron_cpu, megatron_help_percent

logger = logging.getLogger(__name__)

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
    require_megatron_flags(args)
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
    dp_size = data_parallel_size(args)
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
    check_routers(args, config)
    _resolve_lengths(args, config)
    config.staleness.require_attainable()
    _resolve_files(args, config)


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


def _resolve_files(args: argparse.Namespace, config: PluginConfig) -> None:
    rollout = config.rollout
    _refuse_empty_paths(args, config)
    if rollout.tokenizer is None:
        rollout.tokenizer = args.tokenizer_model
    if rollout.tokenizer is None:
        raise ConfigError(
            "--rollout-tokenizer (or --tokenizer-type HuggingFaceTokenizer --tokenizer-model) must name the "
            "tokenizer's folder."
        )
    _require_file(Path(rollout.tokenizer), "tokenizer_config.json", "--rollout-tokenizer")
    if rollout.seed is None:
        rollout.seed = args.seed
    if not 0 <= rollout.seed < 1 << 32:
        raise ConfigError(f"--rollout-seed (by default --seed) must lie between 0 and 2^32 - 1, not {rollout.seed}.")
    if config.vcpo.load_hf is not None:
        _require_file(Path(config.vcpo.load_hf), "config.json", "--vcpo-load-hf")
    check_folders(args)
    folders = (
        ("--save", args.save),
        ("--rollout-run-dir", rollout.run_dir),
        ("--tensorboard-dir", args.tensorboard_dir),
    )
    for flag, folder in folders:
        if folder is not None:
            _require_writable(Path(folder), flag, create=not config.vcpo.dry_run)
    if args.save is not None and args.save_interval is None:
        raise ConfigError("--save needs --save-interval (optimizer steps between two checkpoints).")
    if args.wandb_project and args.save is None and args.wandb_save_dir is None:
        raise ConfigError("--wandb-project needs --wandb-save-dir or --save: a folder for its files.")
    args.dataloader_save = args.save


def _refuse_empty_paths(args: argparse.Namespace, config: PluginConfig) -> None:
    rollout = config.rollout
    paths = {
        "--save": args.save,
        "--load": args.load,
        "--tensorboard-dir": args.tensorboard_dir,
        "--vcpo-load-hf": config.vcpo.load_hf,
        "--rollout-tokenizer": rollout.tokenizer,
        "--rollout-prompts": rollout.prompts,
        "--rollout-eval-prompts": rollout.eval_prompts,
        "--rollout-engine-quantization": rollout.engine_quantization,
        "--rollout-run-dir": rollout.run_dir,
    }
    for flag, path in paths.items():
        if path == "":
            raise ConfigError(f"{flag} is given an empty path (an unset variable of a script?); name one, or drop it.")


def _require_file(folder: Path, name: str, flag: str) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{flag} {folder}: there is no such folder (looked for from {Path.cwd()}).")
    if not (folder / name).is_file():
        raise ConfigError(f"{flag} {folder}: no {name} in that folder.")


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
        parser.epilog = (
            "Without torchrun, a job of one process. For N on this machine: torchrun --nproc-per-node N -m "
            "megatron_vcpo.train FLAGS, or -m megatron_vcpo.supervised."
        )
        return add_vcpo_args(parser)

    _refuse_undecodable(sys.argv[1:])
    args = parse_args(extra_args_provider=provider)
    config = plugin_config_from_args(args)
    if adjust is not None:
        adjust(config)
    if config.vcpo.dry_run and config.vcpo.dry_run_processes is not None:
        args.world_size = config.vcpo.dry_run_processes
    resolve(args, config)
    return args, config


def _refuse_undecodable(words: Sequence[str]) -> None:
    """Bytes that are not UTF-8 reach Python as lone surrogates, which tokenizers, engines and files refuse later."""
    for number, word in enumerate(words, start=1):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            flag = next((before for before in reversed(words[:number]) if before.startswith("--")), "the first one")
            raise ConfigError(
                f"Argument {number} of the command line ({flag.split('=')[0]}) is not UTF-8 text: {word!a}."
            ) from error


def finish(args: argparse.Namespace, config: PluginConfig, vocab_size: int) -> None:
    """Run Megatron's own checks, after which the arguments are final.

    Raises:
        ConfigError: Megatron refuses the flags; its words are in the message.
    """
    from megatron.training.arguments import validate_args

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
        raise ConfigError(f"Megatron refuses these flags: {reason(error)}.") from error
    # validate_args sets it to False, and there is no flag. For allgather every micro-batch has the same rows instead.
    args.variable_seq_lengths = not (args.num_experts and args.moe_token_dispatcher_type == "allgather")


def make_global(args: argparse.Namespace, config: PluginConfig) -> None:
    """Make checked arguments Megatron's global ones, which opens its writers, and say which of the flags do nothing."""
    from megatron.training.global_vars import set_global_variables

    set_global_variables(args)
    if args.rank == 0:
        for sentence in idle_flags(args, config):
            logger.info(f"note: {sentence}")
