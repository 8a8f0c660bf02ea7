"""A Megatron model in a single CPU process, with or without memory for its weights, for the converters."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_vcpo.models.building.gpt_config import gpt_config
from megatron_vcpo.models.description import ModelDescription, ModelFacts, describe_megatron
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.patches import megatron_cpu

# Flags for a process without fused kernels, and flags that Megatron requires although nothing is trained.
_OFFLINE_FLAGS = (
    *("--transformer-impl", "local", "--use-cpu-initialization", "--distributed-backend", "gloo"),
    *("--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion"),
    *("--no-bias-dropout-fusion", "--no-bias-swiglu-fusion", "--no-bias-gelu-fusion"),
    *("--moe-token-dispatcher-type", "alltoall", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"),
)
# The same for arguments that a training run saved with its checkpoint: they replace its layout, kernels and precision.
_OFFLINE_ARGS: dict[str, Any] = {
    "rank": 0,
    "world_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "overlap_p2p_comm": False,
    "batch_p2p_comm": True,
    "tp_comm_overlap": False,
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "params_dtype": torch.float32,
    "bf16": False,
    "fp16": False,
    "fp8": None,
    "fp4": None,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
    "cross_entropy_loss_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": False,
    "moe_enable_routing_replay": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "cuda_graph_impl": "none",
    "cpu_offloading": False,
    "delay_wgrad_compute": False,
    "overlap_moe_expert_parallel_comm": False,
}


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Megatron's parallel state for one process over gloo, without a port; keeps what is initialized already."""
    megatron_cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    megatron_cpu.patch_megatron()
    own_dist, own_state = not dist.is_initialized(), not parallel_state.model_parallel_is_initialized()
    if own_dist:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if own_state:
            parallel_state.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
    finally:
        if own_state:
            parallel_state.destroy_model_parallel()
        if own_dist:
            dist.destroy_process_group()


def args_from_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Megatron's validated arguments for a model's flags (`megatron_flags_for`), for a single process.

    Raises:
        CheckpointError: Megatron refuses them; its own message is included.
    """
    from megatron.training.arguments import validate_args

    parser = _megatron_parser()
    args = parser.parse_args([*flags, *_OFFLINE_FLAGS])
    args.rank, args.world_size = 0, 1
    args._is_global_batch_size_explicitly_specified = False
    if args.seq_length is None:
        args.seq_length = args.max_position_embeddings
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints a thousand lines of arguments
            validate_args(args)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"Megatron refuses the flags of this model: {error}.") from error
    return args


def args_from_checkpoint(saved: argparse.Namespace) -> argparse.Namespace:
    """The arguments that a training run saved, changed for a single process; arguments that it did not save get
    defaults."""
    known = vars(_megatron_parser().parse_args([]))
    return argparse.Namespace(**(known | vars(saved) | _OFFLINE_ARGS))


def _megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def describe_args(args: argparse.Namespace, vocab_size: int) -> ModelDescription:
    """The model that the arguments describe; CheckpointError if it belongs to no family."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    return describe_megatron(core_transformer_config_from_args(args), ModelFacts.from_args(args, vocab_size))


def build_model(args: argparse.Namespace, *, weights: bool) -> Any:
    """Megatron's own GPTModel for the arguments, in fp32. Call it in `single_process`.

    Args:
        args: from `args_from_flags` or `args_from_checkpoint`.
        weights: False gives parameters on the meta device, which take no memory.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder

    config = gpt_config(args)
    config.transformer.perform_initialization = False
    builder, groups = GPTModelBuilder(config), ProcessGroupCollection.use_mpu_process_groups()
    with contextlib.nullcontext() if weights else torch.device("meta"):
        return builder.build_model(groups, pre_process=True, post_process=True).eval()
