"""The description of the policy: read from Megatron's arguments and model, checked against config.json."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from megatron_vcpo.checkpoint.hf_config import check_config_matches
from megatron_vcpo.config import PluginConfig
from megatron_vcpo.mcore.reductions import collective_device
from megatron_vcpo.models.building.rotary import check_rotary
from megatron_vcpo.models.description import ModelDescription, ModelFacts, describe_megatron
from megatron_vcpo.models.naming import unwrap
from megatron_vcpo.rollout.inputs import Inputs


def model_description(
    args: argparse.Namespace, config: PluginConfig, inputs: Inputs, model_chunks: Sequence[nn.Module]
) -> ModelDescription:
    """Family and sizes of the model that was built; also checks its rotary frequencies.

    Raises:
        CheckpointError: the model belongs to no family, or --vcpo-load-hf is another model; names the flags to change.
    """
    transformer = unwrap(model_chunks[0]).config
    facts = ModelFacts.from_args(args, inputs.vocab_size)
    if config.vcpo.load_hf is not None:
        description = check_config_matches(config.vcpo.load_hf, transformer, facts)
    else:
        description = describe_megatron(transformer, facts)
    check_rotary(model_chunks, description)
    return description


def padded_vocab_size(model_chunks: Sequence[nn.Module], tied_embeddings: bool) -> int:
    """Rows of the embedding over all tensor-parallel ranks, padding included; collective over all processes."""
    rows = 0
    for chunk in map(unwrap, model_chunks):
        if getattr(chunk, "embedding", None) is not None:
            rows = chunk.embedding.word_embeddings.num_embeddings
        elif getattr(chunk, "output_layer", None) is not None and not tied_embeddings:
            rows = chunk.output_layer.output_size
    count = torch.tensor([rows], dtype=torch.int64, device=collective_device())
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
    return int(count.item())
