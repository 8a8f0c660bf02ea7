"""The parts of a loop, built as the flags say: engine, reward processes, publisher, samples."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_vcpo.checkpoint.hf_config import write_model_dir
from megatron_vcpo.checkpoint.quantize.recipe import QuantizationRecipe
from megatron_vcpo.config import PluginConfig
from megatron_vcpo.engines.process import ProcessEngine
from megatron_vcpo.engines.protocol import RolloutEngine
from megatron_vcpo.engines.quantized import QuantizedEngine
from megatron_vcpo.engines.vllm.engine import VLLMSettings
from megatron_vcpo.flow.policy_model import model_description, padded_vocab_size
from megatron_vcpo.flow.publisher import Publisher
from megatron_vcpo.models.description import ModelFacts
from megatron_vcpo.models.naming import unwrap
from megatron_vcpo.observability.metrics import MetricsFileError
from megatron_vcpo.observability.samples import SamplesLog
from megatron_vcpo.patches import megatron_cpu, torch_cuda_alias, vllm_cpu_int8_saturation
from megatron_vcpo.rollout.inputs import Inputs, environment_arguments
from megatron_vcpo.rollout.rewards.pool import RewardPool
from megatron_vcpo.runtime.agreement import raise_together
from megatron_vcpo.runtime.logs import log_single_rank
from megatron_vcpo.sync.synchronizer import WeightSynchronizer
from megatron_vcpo.sync.verify import default_tolerance

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def reward_pool(config: PluginConfig, split: Literal["train", "eval"]) -> RewardPool:
    """Start the reward processes of one split."""
    rollout = config.rollout
    return RewardPool(
        rollout.environment,
        split=split,
        seed=int(rollout.seed or 0),
        config=environment_arguments(config),
        prompts_file=rollout.prompts if split == "train" else rollout.eval_prompts,
        workers=rollout.reward_workers,
        timeout=rollout.reward_timeout,
    )


def open_samples(
    args: argparse.Namespace, config: PluginConfig, inputs: Inputs, run_dir: Path, *, next_group: int
) -> SamplesLog | None:
    """samples.jsonl on rank 0, if asked for; else None. Raises MetricsFileError on every rank."""
    samples: SamplesLog | None = None
    failure: MetricsFileError | None = None
    if config.rollout.save_trajectories and args.rank == 0:
        try:
            samples = SamplesLog(
                run_dir,
                next_group=next_group,
                decode_prompt=inputs.tokenizer.decode,
                decode_response=inputs.decode,
            )
        except OSError as error:
            failure = MetricsFileError(
                f"samples.jsonl in {run_dir} could not be opened ({error}); make room or the folder writable, "
                "or choose another one with --rollout-run-dir."
            )
    raise_together(failure)
    return samples


def build_engine(
    args: argparse.Namespace,
    config: PluginConfig,
    inputs: Inputs,
    run_dir: Path,
    model: list[Any],
) -> RolloutEngine:
    """This rank's engine, or its share of one. Raises EngineError if it cannot start."""
    rollout = config.rollout
    quantized, folder = rollout.engine_quantization, config.vcpo.load_hf
    dtype = rollout.engine_dtype_of(args.params_dtype)
    own_tokenizer = quantized is None and folder is None  # copied to the folder that is written
    if own_tokenizer:
        folder = _write_engine_model(args, inputs, run_dir, model, DTYPES[dtype])
    settings = VLLMSettings(
        model_dir=str(quantized or folder),
        tokenizer_dir=None if own_tokenizer else rollout.tokenizer,
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=int(rollout.max_prompt_length or 0) + rollout.max_response_length,
        kv_cache_bytes=rollout.engine_kv_cache_bytes,
        max_sequences=rollout.engine_max_sequences,
        tensor_parallel_size=rollout.engine_tensor_parallel_size,
        seed=int(rollout.seed or 0),
        return_routes=rollout.router_replay == "rollout",
        log_file=str(run_dir / f"engine_rank{args.rank}.log"),
    )
    if rollout.engine_placement == "process":
        return ProcessEngine(
            settings, rank=args.rank, timeout=config.sync.timeout, bucket_bytes=config.sync.bucket_bytes
        )
    engine = settings.build()
    if megatron_cpu.active():
        torch_cuda_alias.hide_cuda()
    if quantized is None:
        return engine
    if vllm_cpu_int8_saturation.in_use():
        log_single_rank(
            logger,
            logging.INFO,
            "this processor adds INT8 products in 16 bits, which saturate: the engine keeps its INT8 weights in two "
            "halves, which is exact and takes twice the time (docs/quantization.md)",
        )
    return QuantizedEngine(engine, QuantizationRecipe(quantized))


def _write_engine_model(
    args: argparse.Namespace, inputs: Inputs, run_dir: Path, model: list[Any], dtype: torch.dtype
) -> str:
    """The Hugging Face folder without weights that describes the policy to the engine; rank 0 writes it."""
    target = run_dir / "engine_model"
    failure: Exception | None = None
    if args.rank == 0:
        facts = ModelFacts.from_args(args, inputs.vocab_size)
        try:
            write_model_dir(target, unwrap(model[0]).config, facts, inputs.files, dtype=dtype)
        except (ValueError, OSError) as error:
            failure = error
    raise_together(failure)
    return str(target)


def build_publisher(
    args: argparse.Namespace,
    config: PluginConfig,
    inputs: Inputs,
    groups: Any,
    model: list[Any],
    optimizer: Any,
    engine: RolloutEngine,
) -> Publisher:
    """What publishes the policy's weights to the engine. Raises SyncError if model and table of names disagree."""
    description = model_description(args, config, inputs, model)
    dtype = DTYPES[config.rollout.engine_dtype_of(args.params_dtype)]
    synchronizer = WeightSynchronizer(
        model,
        description.family,
        description.shape(padded_vocab_size(model, description.tied_embeddings)),
        groups,
        engine,
        config.sync,
        dtype=dtype,
    )
    tolerance = config.sync.verify_tolerance
    if tolerance is None:
        tolerance = default_tolerance(dtype, quantized=config.rollout.engine_quantization is not None)
    return Publisher(
        synchronizer,
        engine,
        config.sync,
        tolerance=tolerance,
        model=model,
        stale_replicas=optimizer if args.overlap_param_gather else None,
    )
