"""Score the tokens of a saved batch with Megatron's model in any dtype, and with vLLM.

Runs in one CPU process. The trainer's model is Megatron's own with packed sequences, as in training. Every model is
built, used and freed before the next one.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_vcpo.checkpoint.convert.source import CheckpointSource, HuggingFaceSource, MegatronSource
from megatron_vcpo.checkpoint.hf_config import megatron_flags_for, write_model_dir
from megatron_vcpo.checkpoint.model_files import with_chosen_tokenizer
from megatron_vcpo.checkpoint.torch_dist import is_megatron
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.diagnostics.mismatch.report import Values
from megatron_vcpo.mcore.forward import packed_seq_params, token_statistics
from megatron_vcpo.mcore.logprobs import OutputContext
from megatron_vcpo.mcore.packing import MicroBatch, RowAlignment, build_micro_batch, plan_micro_batches
from megatron_vcpo.mcore.routers.accounting import recorded_routes
from megatron_vcpo.mcore.routers.replay import RouterReplay
from megatron_vcpo.models.building.gpt_config import gpt_config
from megatron_vcpo.models.building.offline import args_from_flags
from megatron_vcpo.models.description import ModelFacts
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.models.match import match_model

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TOKENS_PER_PASS = 4096
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint, and the arguments that build its model in a single process."""

    source: CheckpointSource
    args: argparse.Namespace

    @property
    def num_experts(self) -> int:
        """Number of experts; 0 for a dense model."""
        return self.source.description.num_experts


def open_weights(folder: Path, *, step: int | None = None) -> Weights:
    """Open a Hugging Face folder or a Megatron checkpoint (iteration `step` or the latest). Call it in
    `single_process`."""
    if is_megatron(folder):
        trained = MegatronSource(folder, step=step)
        return Weights(source=trained, args=trained.args)
    args = args_from_flags(megatron_flags_for(folder))
    return Weights(source=HuggingFaceSource(folder, padded_vocab_size=int(args.padded_vocab_size)), args=args)


def require_same_model(first: Weights, second: Weights) -> None:
    """Raise CheckpointError if two checkpoints are of different models."""
    a, b = first.source.description, second.source.description
    if replace(a, latent=None) != replace(b, latent=None):
        raise CheckpointError(f"{first.source.path} and {second.source.path} are not checkpoints of one model.")


# ---------------------------------------------------------------------- the trainer


class TrainerModel:
    """Megatron's model with a checkpoint's weights in one dtype."""

    def __init__(self, weights: Weights, dtype: str) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        self.weights = weights
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.model = _build(weights.args, DTYPES[dtype], self.groups)
        _fill(self.model, weights.source, self.groups)
        self.replay = RouterReplay([self.model], self.groups) if weights.num_experts else None

    def score(self, trajectories: Sequence[Trajectory], *, temperature: float, routed: bool = False) -> Values:
        """Log-probs of the sampled tokens, [N] in the order of the trajectories.

        Args:
            trajectories: with routes if `routed`.
            temperature: logits are divided by it.
            routed: take the experts from the trajectories' routes; otherwise every router chooses for itself.
        """
        with self._own_routes(not routed):
            found = self._pass(trajectories, temperature)
        return np.concatenate([found[i][t.response_mask] for i, t in enumerate(trajectories)])

    def with_own_routes(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same trajectories with the experts that this model's routers choose."""
        assert self.replay is not None
        with self.replay.recording():
            sheets = []
            for _ in self._passes(trajectories, 1.0):
                sheets += self.replay.finished
            self.replay.finished = sheets
            routes = recorded_routes(self.replay, trajectories, self.weights.num_experts)
        return [replace(t, routed_experts=routes[i]) for i, t in enumerate(trajectories)]

    @contextmanager
    def _own_routes(self, own: bool) -> Iterator[None]:
        with self.replay.suspended() if self.replay is not None and own else nullcontext():
            yield

    def _pass(self, trajectories: Sequence[Trajectory], temperature: float) -> dict[int, Values]:
        found: dict[int, Values] = {}
        for micro, logprobs in self._passes(trajectories, temperature):
            for index, start in zip(micro.indices, micro.starts):
                first = start + len(trajectories[index].prompt_ids) - 1
                found[index] = logprobs[first : first + len(trajectories[index].response_ids)]
        return found

    @torch.no_grad()
    def _passes(self, trajectories: Sequence[Trajectory], temperature: float) -> Iterator[tuple[MicroBatch, Values]]:
        lengths = [t.num_tokens for t in trajectories]
        plan = plan_micro_batches(lengths, list(range(len(lengths))), budget=max(_TOKENS_PER_PASS, *lengths), dp_size=1)
        context = OutputContext(
            vocab_size=self.weights.source.description.vocab_size,
            temperature=temperature,
            chunk=0,
            tp_group=self.groups.tp,
        )
        for indices in plan.bins[0]:
            micro = build_micro_batch(trajectories, indices, alignment=RowAlignment(), device=_CPU)
            packed = packed_seq_params(micro)
            if self.replay is not None:
                self.replay.attach(packed, micro, self.model)
            output = token_statistics(self.model, micro, packed, context)
            if self.replay is not None:
                self.replay.finish_pass(training=False)
            yield micro, output["logprobs"].double().numpy()


def _build(args: argparse.Namespace, dtype: torch.dtype, groups: Any) -> Any:
    """GPTModel in the dtype, wrapped as in training."""
    from megatron.core.transformer.module import Float16Module
    from megatron.training.models.gpt import GPTModelBuilder

    half = dtype != torch.float32
    args = argparse.Namespace(**vars(args))
    args.fp16, args.bf16 = dtype == torch.float16, dtype == torch.bfloat16
    args.params_dtype = dtype
    config = gpt_config(args)
    config.transformer.perform_initialization = False
    model = GPTModelBuilder(config).build_model(groups, pre_process=True, post_process=True)
    return (Float16Module(config.transformer, model) if half else model).eval()


@torch.no_grad()
def _fill(model: Any, source: CheckpointSource, groups: Any) -> None:
    match = match_model([model], source.specs, source.shape, groups)
    if (error := match.error(CheckpointError)) is not None:
        raise error
    specs = {spec.name: spec for spec in source.specs}
    for name, parameter in match.local.items():
        if name in specs:
            parameter.copy_(source.parameter(specs[name]))
            if not bool(torch.isfinite(parameter).all()):
                raise CheckpointError(f"{name} of {source.path} does not fit {parameter.dtype}: leave that type out.")


@contextmanager
def trainer_model(weights: Weights, dtype: str) -> Iterator[TrainerModel]:
    """A TrainerModel whose memory is freed at the end of the context."""
    yield TrainerModel(weights, dtype)
    gc.collect()


# ---------------------------------------------------------------------- the engine


def score_with_engine(
    weights: Weights, dtype: str, trajectories: Sequence[Trajectory], *, scratch: Path, tokenizer: Path | None
) -> Values:
    """Log-probs [N] of the sampled tokens at temperature 1, from a new vLLM engine.

    Args:
        weights: sent to the engine as in training.
        dtype: of the engine.
        trajectories: what to score.
        scratch: folder for the config.json made for a Megatron checkpoint.
        tokenizer: folder with the tokenizer that a Megatron checkpoint needs as well.

    Raises:
        EngineError, CheckpointError: the engine cannot start, take the weights or score.
    """
    from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
    from megatron_vcpo.patches import megatron_cpu, torch_cuda_alias

    engine = VLLMEngine(
        VLLMSettings(
            model_dir=str(_engine_folder(weights, dtype, scratch, tokenizer)),
            dtype=dtype,  # type: ignore[arg-type]
            max_model_len=max(t.num_tokens for t in trajectories) + 1,
            max_sequences=64,
        )
    )
    if megatron_cpu.active():
        torch_cuda_alias.hide_cuda()
    try:
        source = weights.source
        kept = {name: spec.dtype for spec in source.specs for name, _ in spec.hf}
        tensors = ((name, source.hf_tensor(name).to(kept[name] or DTYPES[dtype])) for name in source.names)
        engine.update_weights(tensors, 0)
        sequences = [[*t.prompt_ids.tolist(), *t.response_ids.tolist()] for t in trajectories]
        scores = engine.score(sequences, [len(t.prompt_ids) for t in trajectories])
    finally:
        engine.shutdown()
    return np.concatenate([s[t.response_mask] for s, t in zip(scores, trajectories)]).astype(np.float64)


def _engine_folder(weights: Weights, dtype: str, scratch: Path, tokenizer: Path | None) -> Path:
    from megatron.training.argument_utils import core_transformer_config_from_args

    if isinstance(weights.source, HuggingFaceSource):
        return weights.source.path
    files = with_chosen_tokenizer(weights.source.files, tokenizer)
    if files is None or not files.has_tokenizer:
        raise CheckpointError(
            f"--engine needs --tokenizer, the folder of the model's tokenizer: none is beside {weights.source.path}."
        )
    facts = ModelFacts.from_args(weights.args, weights.source.description.vocab_size)
    config = core_transformer_config_from_args(weights.args)
    write_model_dir(scratch, config, facts, files, dtype=DTYPES[dtype])
    return scratch
