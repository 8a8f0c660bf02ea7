"""Everything that can be found wrong before a process group, a model or an engine exists."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from megatron_vcpo.checkpoint.checksums import check_sizes
from megatron_vcpo.checkpoint.guard import loaded_iteration
from megatron_vcpo.checkpoint.hf_config import check_config_matches
from megatron_vcpo.checkpoint.load_hf import check_hf_folder
from megatron_vcpo.checkpoint.model_files import (
    CONFIG,
    ModelFiles,
    read_model_folder,
    read_record,
    read_tokenizer_folder,
)
from megatron_vcpo.checkpoint.quantize.recipe import QuantizationRecipe, is_quantized
from megatron_vcpo.config import ConfigError, PluginConfig
from megatron_vcpo.environments import Environment, EnvironmentSetupError, draw_prompt, make_environment
from megatron_vcpo.environments.protocol import size_of
from megatron_vcpo.launch.dry_run import cache_tokens
from megatron_vcpo.launch.megatron_flags import reason
from megatron_vcpo.models.description import ModelFacts, describe_hf, describe_megatron
from megatron_vcpo.models.description.hf import check_engine_reads
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.objective import load_advantages, load_loss
from megatron_vcpo.patches import checkpoint_unpickling, megatron_cpu
from megatron_vcpo.patches.checkpoint_unpickling import UnreadableCheckpoint
from megatron_vcpo.rollout.decode import ResponseDecoder
from megatron_vcpo.rollout.inputs import Inputs, environment_arguments
from megatron_vcpo.rollout.sampler import PromptSampler
from megatron_vcpo.rollout.stopping import stop_token_ids

_SHOWN = 200  # characters of a flag's value in a sentence


def check(args: argparse.Namespace, config: PluginConfig) -> Inputs:
    """Find the loss; open the environments, the tokenizer and the checkpoint's files, and settle where responses end
    (`config.rollout.stop_token_ids`).

    Raises:
        ConfigError: one sentence about the first thing that is wrong.
    """
    load_loss(config.vcpo.loss)
    load_advantages(config.vcpo.advantages)
    _check_load(args, sizes=config.vcpo.verify_checkpoint == "on")
    environment, evaluation = _environments(config)
    tokenizer = _tokenizer(str(config.rollout.tokenizer))
    vocab_size = _vocab_size(args, config, len(tokenizer))
    try:
        _check_first_prompt(environment, tokenizer, config)
        if evaluation is not None and size_of(evaluation) != 0:
            draw_prompt(evaluation, 0)
    except EnvironmentSetupError as error:
        raise ConfigError(str(error)) from error
    files, ends = _files(args, config, tokenizer, vocab_size)
    return Inputs(
        environment=environment,
        eval_environment=evaluation,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        files=files,
        decode=ResponseDecoder(tokenizer, ends),
    )


def check_model(args: argparse.Namespace, config: PluginConfig, vocab_size: int) -> None:
    """The model of Megatron's checked flags is one that an engine can run, and the one in --vcpo-load-hf.

    Raises:
        ConfigError: one sentence that names the flags to change, or the weights' file that cannot be read.
    """
    from megatron.training.arguments import core_transformer_config_from_args

    try:
        transformer = core_transformer_config_from_args(args)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"Megatron refuses this model: {reason(error)}.") from error
    longest = int(config.rollout.max_prompt_length or 0) + config.rollout.max_response_length
    cached = cache_tokens(args, config)
    if cached < longest:
        raise ConfigError(
            f"--rollout-engine-kv-cache-bytes {config.rollout.engine_kv_cache_bytes} holds {cached} tokens, fewer than "
            f"the longest sequence, --rollout-max-prompt-length + --rollout-max-response-length = {longest}; raise it."
        )
    if megatron_cpu.active() and not config.vcpo.dry_run:
        _check_cache_fits(config.rollout.engine_kv_cache_bytes)
    facts, folder = ModelFacts.from_args(args, vocab_size), config.vcpo.load_hf
    if (quantized := config.rollout.engine_quantization) is not None:
        try:
            QuantizationRecipe(quantized)
            check_config_matches(quantized, transformer, facts)
        except CheckpointError as error:
            raise ConfigError(f"--rollout-engine-quantization: {error}") from error
    try:
        if folder is None:
            describe_megatron(transformer, facts)
            return
        check_config_matches(folder, transformer, facts)
        check_engine_reads(folder)
        if is_quantized(folder):
            raise ConfigError(
                f"--vcpo-load-hf {folder} is quantized, and nothing is trained from rounded weights: give the original "
                "there, and this folder as --rollout-engine-quantization."
            )
        if args.load is None and not config.vcpo.dry_run:
            check_hf_folder(folder)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _check_load(args: argparse.Namespace, *, sizes: bool) -> None:
    """No file of the checkpoint in --load is missing or cut short, and its metadata is nothing else."""
    folder = loaded_iteration(args)
    if folder is None:
        return
    checkpoint_unpickling.apply()
    try:
        if sizes:
            check_sizes(folder, rollout_state=not args.finetune)
        if (folder / ".metadata").is_file():
            FileSystemReader(folder).read_metadata()
    except (CheckpointError, UnreadableCheckpoint) as error:
        raise ConfigError(f"--load: {error}") from error


def _check_cache_fits(cache_bytes: int) -> None:
    """On a CPU the caches of this machine's engines lie in its memory, which the kernel would promise all the same."""
    engines = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cache_bytes * engines > memory:
        raise ConfigError(
            f"--rollout-engine-kv-cache-bytes {cache_bytes} for each of {engines} engine rank(s) is more than the "
            f"{memory} bytes of this machine's memory; lower it."
        )


def _environments(config: PluginConfig) -> tuple[Environment, Environment | None]:
    rollout = config.rollout
    if rollout.environment == "jsonl":
        if rollout.prompts is None:
            raise ConfigError("--rollout-environment jsonl needs --rollout-prompts FILE.")
        if rollout.eval_interval and rollout.eval_prompts is None:
            raise ConfigError("--rollout-eval-interval with jsonl needs --rollout-eval-prompts FILE.")
    elif rollout.prompts is not None:
        raise ConfigError(f"--rollout-prompts is for --rollout-environment jsonl, not {rollout.environment}.")
    arguments, seed = environment_arguments(config), int(rollout.seed or 0)
    try:
        environment = make_environment(
            rollout.environment, split="train", seed=seed, config=arguments, prompts_file=rollout.prompts
        )
        evaluation = None
        if rollout.eval_interval:
            evaluation = make_environment(
                rollout.environment, split="eval", seed=seed, config=arguments, prompts_file=rollout.eval_prompts
            )
    except EnvironmentSetupError as error:
        raise ConfigError(str(error)) from error
    return environment, evaluation


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers package raises plain Exception
        first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise ConfigError(
            f"--rollout-tokenizer {folder} cannot be loaded ({type(error).__name__}: {first_line})."
        ) from error


def _vocab_size(args: argparse.Namespace, config: PluginConfig, tokens: int) -> int:
    vocab_size = int(args.vocab_size or tokens)
    if config.vcpo.load_hf is not None:
        try:
            vocab_size = describe_hf(config.vcpo.load_hf).vocab_size
        except CheckpointError as error:
            raise ConfigError(f"--vcpo-load-hf: {error}") from error
        if args.vocab_size not in (None, vocab_size):
            raise ConfigError(
                f"--vocab-size {args.vocab_size} is not the checkpoint's ({vocab_size} in "
                f"{Path(config.vcpo.load_hf) / 'config.json'}); drop it."
            )
    if tokens > vocab_size:
        raise ConfigError(
            f"The tokenizer {config.rollout.tokenizer} knows {tokens} tokens, the model only {vocab_size}; "
            "they do not belong together (--rollout-tokenizer, --vocab-size)."
        )
    if args.padded_vocab_size is not None and args.padded_vocab_size < vocab_size:
        raise ConfigError(
            f"--padded-vocab-size {args.padded_vocab_size} is below the vocabulary's {vocab_size} tokens."
        )
    return vocab_size


def _files(
    args: argparse.Namespace, config: PluginConfig, tokenizer: Any, vocab_size: int
) -> tuple[ModelFiles, frozenset[int]]:
    """What belongs to the model, and the tokens that its files, and those of the engine's folder, name as ends; all
    that end a response are entered into the configuration."""
    rollout, source, quantized = config.rollout, config.vcpo.load_hf, config.rollout.engine_quantization
    folder = str(rollout.tokenizer)
    try:
        engine = None
        if quantized is not None and (Path(quantized) / CONFIG).is_file():  # check_model refuses any other folder
            engine = read_model_folder(quantized)
        if source is not None:
            files = read_model_folder(source)
        else:
            record = None if args.load is None else read_record(args.load)
            files = record or engine or read_tokenizer_folder(folder, tokenizer)
        models = [files] if engine is None else [files, engine]  # an engine also stops where its own folder says
        rollout.stop_token_ids = stop_token_ids(rollout, models, tokenizer, vocab_size)
        files = files.with_tokenizer(folder)
        if source is None and quantized is None:  # the engine's folder is written, with these files
            files.require_tokenizer(folder, "--rollout-tokenizer")
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return files, frozenset(token for model in models for token in model.end_ids)


def _check_first_prompt(environment: Environment, tokenizer: Any, config: PluginConfig) -> None:
    text = draw_prompt(environment, 0).text
    ids = tokenizer.encode(text)
    unknown = tokenizer.unk_token_id
    if unknown is not None and ids and all(token == unknown for token in ids):
        raise ConfigError(
            f"The tokenizer {config.rollout.tokenizer} knows no token of the first prompt {text[:60]!r}; "
            "it is not the tokenizer of this task's language."
        )
    if config.rollout.chat_template and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"--rollout-chat-template: the tokenizer {config.rollout.tokenizer} has no chat template.")
    seed, longest = int(config.rollout.seed or 0), int(config.rollout.max_prompt_length or 0)
    PromptSampler(environment, tokenizer, seed=seed, max_length=longest, chat=config.rollout.chat_template).draw(1)
