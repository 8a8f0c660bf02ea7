"""Run under torchrun with two processes: loads and streams every model of `sys.argv[1]` in several layouts."""

# ruff: noqa: E402 - torch has to be patched before Megatron is imported

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_vcpo.patches import megatron_cpu

megatron_cpu.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors.torch import load_file

from megatron_vcpo.checkpoint.load_hf import load_hf_checkpoint
from megatron_vcpo.config import SyncConfig
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.models.naming import ModelShape, family_by_name
from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.gather import WeightGatherer
from megatron_vcpo.sync.synchronizer import WeightSynchronizer
from tests.oracle.model_pairs import VOCAB, gpt_models, transformer_config
from tests.oracle.staging_meter import StagingMeter

_DEADLINE = 5  # minutes that a collective waits: a mismatch fails instead of hanging
PADDED = 256  # what Megatron makes of 101 at two tensor-parallel ranks: the second holds padding only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One checkpoint in one layout."""

    folder: str  # named after the family, with a suffix for a variant
    tied: bool = False
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    expert_tp: int | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.folder.split("-")[0]


CASES = (
    Case(folder="llama", tied=True, tp=2),
    Case(folder="qwen2", tp=2),
    Case(folder="llama-one_group", tp=2, changes={"num_query_groups": 1}),
    Case(folder="llama", tied=True, pp=2),
    Case(folder="qwen2", pp=2),
    Case(folder="qwen3-four_layers", tied=True, pp=2, vpp=2, changes={"num_layers": 4}),
    Case(folder="qwen3_moe", ep=2),
    Case(folder="qwen3_moe", tp=2),
    Case(folder="qwen3_moe", tp=2, ep=2, expert_tp=1),
    Case(folder="qwen3_moe", expert_tp=2),  # experts are cut where nothing else is
    Case(folder="qwen3_moe", pp=2),
    Case(folder="mixtral", tp=2, ep=2, expert_tp=1),
    Case(folder="mixtral", tied=True, pp=2),
    Case(folder="deepseek_v2", tp=2),
    Case(folder="deepseek_v2", pp=2),
    Case(folder="deepseek_v2", ep=2),
    Case(folder="deepseek_v3", tp=2),
    Case(folder="deepseek_v3", tp=2, ep=2, expert_tp=1),
    Case(folder="deepseek_v3", ep=2),
    Case(folder="gpt_oss", tp=2, ep=2, expert_tp=1),
    Case(folder="gpt_oss", pp=2),
    Case(folder="gpt_oss", ep=2),
    Case(folder="deepseek_v3-four_layers", pp=2, vpp=2, changes={"num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]}),
)
_FP32 = "e_score_correction_bias"


def build(case: Case) -> tuple[list[Any], ModelShape, Any]:
    """Parallel state, this rank's model, its shape and process groups."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.expert_tp,
        distributed_timeout_minutes=_DEADLINE,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234 + dist.get_rank())
    config = transformer_config(
        case.family,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.expert_tp,
        sequence_parallel=case.tp > 1 and case.family not in ("llama", "qwen2", "qwen3"),
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=case.vpp is not None,
        batch_p2p_comm=case.vpp is None,
        **case.changes,
    )
    chunks = gpt_models(config, tied=case.tied, padded_vocab=PADDED)
    shape = ModelShape.from_megatron(config, vocab_size=VOCAB, padded_vocab_size=PADDED, tied_embeddings=case.tied)
    return chunks, shape, ProcessGroupCollection.use_mpu_process_groups()


@torch.no_grad()
def logits(chunks: list[Any], case: Case, groups: Any, tokens: torch.Tensor) -> torch.Tensor | None:
    """Full logits on the last pipeline stage: the chunks in order, hidden states handed on by broadcast."""
    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, length)
    causal = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    config = chunks[0].config
    hidden = torch.empty(length // (case.tp if config.sequence_parallel else 1), batch, config.hidden_size)
    out = None
    for chunk, stage in itertools.product(chunks, range(case.pp)):
        if case.pp == 1:
            out = chunk(tokens, positions, causal)
            continue
        last = chunk is chunks[-1] and stage == case.pp - 1
        if groups.pp.rank() == stage:
            chunk.set_input_tensor(hidden.clone())
            out = chunk(tokens, positions, causal)
            if not last:
                hidden.copy_(out)
        if not last:
            dist.broadcast(hidden, group=groups.pp, group_src=stage)
    if groups.pp.rank() != case.pp - 1:
        return None
    assert out is not None
    parts = [torch.empty_like(out) for _ in range(case.tp)]
    dist.all_gather(parts, out.contiguous(), group=groups.tp)
    return torch.cat(parts, dim=-1)[..., :VOCAB]


def check_round_trip(case: Case, root: Path) -> None:
    """The checkpoint computes what transformers computes, and comes back bit for bit on every rank."""
    folder = root / f"{case.folder}-{'tied' if case.tied else 'untied'}"
    chunks, shape, groups = build(case)
    family = family_by_name(case.family)
    load_hf_checkpoint(chunks, family, shape, folder, groups)
    probe = load_file(folder / "probe.safetensors")
    if (ours := logits(chunks, case, groups, probe["tokens"])) is not None:
        torch.testing.assert_close(ours, probe["logits"], rtol=1e-5, atol=1e-5)
    saved = load_file(folder / "model.safetensors")
    for bucket_bytes in (1, 8192, 64 << 20):
        gatherer = WeightGatherer(chunks, family, shape, groups, dtype=torch.float32, bucket_bytes=bucket_bytes)
        streamed = {name: tensor.clone() for name, tensor in gatherer.stream()}
        assert list(streamed) == gatherer.names
        assert streamed.keys() == saved.keys(), streamed.keys() ^ saved.keys()
        assert all(torch.equal(streamed[name], saved[name]) for name in saved)
    half = WeightGatherer(chunks, family, shape, groups, dtype=torch.bfloat16)
    for name, tensor in half.stream():
        assert torch.equal(tensor, saved[name] if name.endswith(_FP32) else saved[name].bfloat16()), name


def check_key_gradients(case: Case, root: Path) -> None:
    """The projection down to the latents of keys gets the gradient that transformers computes, over all heads."""
    folder = root / f"{case.folder}-untied"
    chunks, shape, groups = build(case)
    load_hf_checkpoint(chunks, family_by_name(case.family), shape, folder, groups)
    probe = load_file(folder / "probe.safetensors")
    batch, length = probe["tokens"].shape
    causal = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    out = chunks[0](probe["tokens"], torch.arange(length).expand(batch, length), causal)
    mine = max(0, min(VOCAB - groups.tp.rank() * out.size(-1), out.size(-1)))  # the rest pads the vocabulary
    (out[..., :mine].square().sum() / (batch * length * VOCAB)).backward()
    for index, layer in enumerate(chunks[0].decoder.layers):
        shard = layer.self_attention.linear_kv_down_proj.weight.grad
        parts = [torch.empty_like(shard) for _ in range(case.tp)]
        dist.all_gather(parts, shard.contiguous(), group=groups.tp)
        expected = probe[f"model.layers.{index}.self_attn.kv_a_proj_with_mqa.weight"]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-7)


def check_staging(case: Case) -> None:
    """A stream over ranks holds a few of its largest buckets, never the model."""
    sizes: dict[str, Any] = {"num_layers": 8, "ffn_hidden_size": 256}
    if case.family == "qwen3_moe":
        sizes |= {"moe_layer_freq": 1, "moe_ffn_hidden_size": 64}
    chunks, shape, groups = build(dataclasses.replace(case, changes=sizes))
    family = family_by_name(case.family)
    gatherer = WeightGatherer(chunks, family, shape, groups, dtype=torch.float32, bucket_bytes=32768)
    largest = max(bucket.nbytes(4) for bucket in gatherer.buckets)
    with StagingMeter(p for chunk in chunks for p in chunk.parameters()) as meter:
        for name, tensor in gatherer.stream():
            del name, tensor
    # two, and one more that gloo's thread may let go of a moment late
    assert 0 < meter.peak <= 3 * largest < gatherer.nbytes / 3, (meter.peak, largest, gatherer.nbytes)


class FailingEngine:
    """Raises at its third tensor on one rank."""

    float32_weights: frozenset[str] = frozenset()

    def __init__(self, rank: int) -> None:
        self.version: int | None = None
        self._fails = dist.get_rank() == rank

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        for index, _ in enumerate(weights):
            if self._fails and index == 2:
                raise RuntimeError("out of memory")
        self.version = version


def check_failure_on_one_rank(case: Case, root: Path) -> None:
    """Whatever one rank meets, every rank raises, and none waits."""
    chunks, shape, groups = build(case)
    family = family_by_name(case.family)
    engine: Any = FailingEngine(rank=1)
    synchronizer = WeightSynchronizer(chunks, family, shape, groups, engine, SyncConfig(), dtype=torch.float32)
    message = ""
    try:
        synchronizer.publish(3)
    except SyncError as error:
        message = str(error)
    assert "out of memory" in message
    assert "model.layers.0" in message
    assert engine.version is None
    assert message.startswith("Rank 1 failed") == (dist.get_rank() == 0)

    folder = root / (f"{case.folder}-untied" if dist.get_rank() == 0 else "nowhere")
    try:
        load_hf_checkpoint(chunks, family, shape, folder, groups)
    except CheckpointError as error:
        assert "nowhere" in str(error)  # noqa: PT017 - not a pytest test
    else:
        raise AssertionError("a checkpoint missing on one rank was accepted")

    if dist.get_rank() == 1:
        del chunks[0].decoder.final_layernorm
    try:
        WeightGatherer(chunks, family, shape, groups, dtype=torch.float32)
    except SyncError as error:
        assert "decoder.final_layernorm.weight" in str(error)  # noqa: PT017 - not a pytest test
    else:
        raise AssertionError("a model without its final norm was accepted")


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=_DEADLINE))
    megatron_cpu.patch_megatron()
    for case in CASES:
        check_round_trip(case, root)
        if dist.get_rank() == 0:
            print("ok", case, flush=True)
    for family in ("deepseek_v2", "deepseek_v3"):
        check_key_gradients(Case(folder=family, tp=2), root)
    for case in (CASES[1], CASES[4], CASES[8]):
        check_staging(case)
    check_failure_on_one_rank(CASES[1], root)
    check_failure_on_one_rank(CASES[4], root)
    dist.barrier()
    if dist.get_rank() == 0:
        print("all layouts passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
