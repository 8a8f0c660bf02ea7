"""One small policy, the same weights under every parallel layout, and steps of the real loop over it."""

# Imports of Megatron are inside: patches.megatron_cpu.install() has to come first.
from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.data.trajectory import Trajectory
from tests.oracle.worker import DEADLINE

VOCAB, PADDED_VOCAB, SEQUENCE, HIDDEN = 61, 64, 40, 32


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the policy is spread over processes, and what else must not change a number."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    distopt: bool = False
    overlap: bool = False
    recompute: bool = False
    dispatcher: str = "alltoall"
    budget: int | None = None  # tokens of a micro-batch, where not the policy's own
    logit_chunk: int = 0
    reverse: bool = False  # the trajectories in another order

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != type(self).__dataclass_fields__[k].default}
        return " ".join(f"{k}={v}" for k, v in changed.items()) or "single"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is trained."""

    moe: bool = False
    tied: bool = False
    config: VCPOConfig = field(default_factory=VCPOConfig)
    dtype: torch.dtype = torch.float32
    optimizer: dict[str, Any] = field(default_factory=dict)  # fields of OptimizerConfig
    transformer: dict[str, Any] = field(default_factory=dict)  # fields of TransformerConfig


@dataclass
class Trainer:
    """A policy in one layout, with everything a loop holds."""

    policy: Policy
    layout: Layout
    model: list[Any]
    optimizer: Any
    scheduler: Any
    groups: Any
    step: Any
    gatherer: Any
    set_weights: Callable[[Callable[[str], torch.Tensor]], None]  # from whole tensors by their Hugging Face names
    losses: list[dict[str, torch.Tensor]] = field(default_factory=list)  # what the schedule returned of the last step

    def train(self, trajectories: Sequence[Trajectory], lag: float = 0.0) -> dict[str, float]:
        """One optimizer step; its metrics."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        while True:
            metrics = self._attempt(trajectories, lag, get_forward_backward_func())
            if not self.step.repeat:
                return metrics

    def _attempt(self, trajectories: Sequence[Trajectory], lag: float, schedule: Any) -> dict[str, float]:
        self.step.begin(trajectories, model=self.model, forward_backward=schedule, lag=lag)
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        feeds = [self.step.data_iterator() for _ in self.model]
        self.losses = schedule(
            forward_step_func=self.step.forward_step,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self.model,
            num_microbatches=self.step.num_micro_batches,
            seq_length=self.step.sequence_length,
            micro_batch_size=1,
            decoder_seq_length=self.step.sequence_length,
            forward_only=False,
        )
        success, grad_norm, _ = self.optimizer.step()
        if success:
            self.scheduler.step(len(trajectories))
        return self.step.end(success=success, grad_norm=grad_norm)

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters of the whole model, on every rank, by their Hugging Face names."""
        if self.layout.overlap and self.layout.distopt:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
        return {name: tensor.clone() for name, tensor in self.gatherer.stream()}


def trajectories(seed: int = 0) -> list[Trajectory]:
    """Thirteen, in groups of five, four, three and one, of lengths 3 to 34, one of them with an empty response."""
    rng = np.random.default_rng(seed)
    out = []
    for group, size in enumerate((5, 4, 3, 1)):
        for index in range(size):
            length = 0 if (group, index) == (1, 2) else int(rng.integers(1, 26))
            out.append(
                Trajectory(
                    prompt_ids=rng.integers(0, VOCAB, int(rng.integers(2, 9))).astype(np.int32),
                    response_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                    behavior_logprobs=(-4.1 + 0.1 * rng.standard_normal(length)).astype(np.float32),
                    versions=np.zeros(length, np.int32),
                    response_mask=rng.random(length) < 0.9,
                    reward=float(rng.integers(0, 2)),
                    group_id=group,
                    index=index,
                )
            )
    return out


def _transformer_config(policy: Policy, layout: Layout) -> Any:
    from tests.oracle.tiny_gpt import Size, transformer_config

    moe = {"moe_token_dispatcher_type": layout.dispatcher} if policy.moe else {}
    if layout.recompute:
        moe |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return transformer_config(
        Size(layers=4, hidden=HIDDEN, experts=4 if policy.moe else 0),
        policy.dtype,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sp,
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        variable_seq_lengths=layout.dispatcher != "allgather",
        qk_layernorm=True,
        **moe,
        **policy.transformer,
    )


def build(policy: Policy, layout: Layout) -> Trainer:
    """Parallel state, model, optimizer and step; a collective over all processes of the job."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module

    import megatron_vcpo
    from megatron_vcpo.models.naming import ModelShape, family_by_name
    from megatron_vcpo.optim import EssParamScheduler, EssSettings
    from megatron_vcpo.sync.gather import WeightGatherer

    _initialize_groups(layout)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = _transformer_config(policy, layout)
    chunks = [_gpt_model(policy, layout, config, vp_stage) for vp_stage in range(layout.vpp or 1)]
    if policy.dtype == torch.float64:
        chunks = [chunk.double() for chunk in chunks]  # torch's norms know nothing of params_dtype
    family = family_by_name("qwen3_moe" if policy.moe else "qwen3")
    shape = ModelShape.from_megatron(
        config, vocab_size=VOCAB, padded_vocab_size=PADDED_VOCAB, tied_embeddings=policy.tied
    )
    set_weights = partial(_set_weights, chunks, family, shape, groups)
    set_weights(named_weights({name: size for spec in family.parameters(shape) for name, size in spec.hf}))
    half = policy.dtype in (torch.float16, torch.bfloat16)
    if half:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=half,
        use_distributed_optimizer=layout.distopt,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap and layout.distopt,
        bucket_size=5000 if layout.overlap else None,
    )
    model = [DistributedDataParallel(config, ddp, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]
    fields = {
        "optimizer": "adam", "lr": 1e-2, "weight_decay": 0.0, "clip_grad": 1.0, "adam_eps": 1e-3,
        "params_dtype": policy.dtype, "fp16": policy.dtype == torch.float16, "bf16": policy.dtype == torch.bfloat16,
        "use_distributed_optimizer": layout.distopt, "overlap_param_gather": layout.overlap and layout.distopt,
        "initial_loss_scale": 2.0**10,
    }  # fmt: skip
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**fields, **policy.optimizer}), model)
    config.grad_scale_func = optimizer.scale_loss
    if layout.overlap:
        config.no_sync_func = model[0].no_sync if len(model) == 1 else [chunk.no_sync for chunk in model]
    rates = {"init_lr": 0.0, "max_lr": 1e-2, "min_lr": 1e-2, "lr_warmup_steps": 0, "lr_decay_steps": 1000}
    decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 1000, "wd_incr_style": "constant"}
    ess = EssSettings.of(policy.config)
    scheduler = EssParamScheduler(optimizer, lr_decay_style="constant", ess=ess, **rates, **decay)
    step = megatron_vcpo.register(
        policy.config,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        groups=groups,
        vocab_size=VOCAB,
        sequence_length=SEQUENCE,
        max_response_length=32,
    )
    gatherer = WeightGatherer(model, family, shape, groups, dtype=torch.float32)
    return Trainer(policy, layout, model, optimizer, scheduler, groups, step, gatherer, set_weights)


_groups_of: tuple[Any, ...] = ()


def _initialize_groups(layout: Layout) -> None:
    """Megatron's parallel state for the layout; connecting its forty groups takes a second, so they are kept."""
    from megatron.core import parallel_state

    global _groups_of
    sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp)
    if parallel_state.model_parallel_is_initialized():
        if _groups_of == (sizes, parallel_state.get_data_parallel_group()):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=int(DEADLINE.total_seconds() // 60),
    )
    _groups_of = (sizes, parallel_state.get_data_parallel_group())


def _gpt_model(policy: Policy, layout: Layout, config: Any, vp_stage: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_vcpo.patches.cpu_packed_attention import PackedCoreAttention

    spec = get_gpt_layer_local_spec(num_experts=4 if policy.moe else None, normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    stage = {"ignore_virtual": layout.vpp is None, "vp_stage": vp_stage if layout.vpp else None}
    return GPTModel(
        config,
        spec,
        vocab_size=PADDED_VOCAB,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        parallel_output=True,
        share_embeddings_and_output_weights=policy.tied,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        vp_stage=stage["vp_stage"],
    )


def named_weights(sizes: Mapping[str, Sequence[int]]) -> Callable[[str], torch.Tensor]:
    """Weights that follow from their names alone, in fp32, for tensors of the given sizes."""

    def read(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(tuple(sizes[name]), generator=generator)
        return 1.0 + 0.2 * values if len(sizes[name]) == 1 else 0.2 * values

    return read


@torch.no_grad()
def _set_weights(
    chunks: Sequence[Any], family: Any, shape: Any, groups: Any, read: Callable[[str], torch.Tensor]
) -> None:
    """Write this rank's shards of whole tensors, which `read` gives by their Hugging Face names."""
    from megatron_vcpo.models.match import match_model
    from megatron_vcpo.models.naming import ParameterLayout as Place
    from megatron_vcpo.models.naming import import_shard
    from megatron_vcpo.models.naming.families import EMBEDDING, OUTPUT_LAYER

    specs = {spec.name: spec for spec in family.parameters(shape)}
    place = Place.of(groups)
    for name, parameter in match_model(chunks, list(specs.values()), shape, groups).local.items():
        spec = specs[EMBEDDING if name == OUTPUT_LAYER and shape.tied_embeddings else name]
        parameter.copy_(import_shard(spec, shape, read, *place.tp_of(spec)))
