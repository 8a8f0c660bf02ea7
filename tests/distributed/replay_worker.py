"""Run under torchrun: routing replay in every layout of this job, compared with one process's."""

# ruff: noqa: E402 - torch has to be patched before Megatron is imported

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from megatron_vcpo.patches import megatron_cpu

megatron_cpu.install()

import numpy as np
import torch
import torch.distributed as dist

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.flow.routes import with_trainer_routes
from megatron_vcpo.mcore.routers.replay import RouterReplay
from tests.distributed.layouts_worker import compare
from tests.oracle import layouts
from tests.oracle.layouts import Layout, Policy, Trainer, trajectories
from tests.oracle.worker import check, worker

EXPERTS, TOPK = 4, 2
LOGPROB_TOLERANCE = 1e-5

# Several micro-batches, scored before they are trained on, in a model whose first layer is dense.
CONFIG = VCPOConfig(tokens_per_micro_batch=40, baseline_scope="minibatch", kl_coefficient=0.05)
POLICIES = {
    "experts": Policy(moe=True, config=CONFIG),
    "dense_first": Policy(moe=True, config=CONFIG, transformer={"moe_layer_freq": [0, 1, 1, 1]}),
    "dense_stage": Policy(moe=True, config=CONFIG, transformer={"moe_layer_freq": [0, 0, 1, 1]}),
}
LAYOUTS = (
    (Layout(tp=2, sp=True), "dense_first"),
    (Layout(tp=2, sp=True, ep=2, etp=1, recompute=True), "experts"),
    (Layout(pp=2), "dense_stage"),
    (Layout(pp=2, recompute=True), "experts"),
    (Layout(pp=2, vpp=2, recompute=True), "dense_first"),
    (Layout(ep=2), "dense_first"),
    (Layout(ep=2, dispatcher="allgather"), "experts"),
    (Layout(cp=2), "dense_first"),
    (Layout(distopt=True, overlap=True), "experts"),
)


def _gpt_model(policy: Policy, layout: Layout, config: Any, vp_stage: int) -> Any:
    """As tests.oracle.layouts builds it, with the layers that the config makes dense or of experts."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_vcpo.patches.cpu_packed_attention import PackedCoreAttention

    stage = {"ignore_virtual": layout.vpp is None, "vp_stage": vp_stage if layout.vpp else None}
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage["vp_stage"]
    )
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    return GPTModel(
        config,
        spec,
        vocab_size=layouts.PADDED_VOCAB,
        max_sequence_length=layouts.SEQUENCE,
        position_embedding_type="rope",
        parallel_output=True,
        share_embeddings_and_output_weights=policy.tied,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        vp_stage=stage["vp_stage"],
    )


def _routed(batch: Sequence[Trajectory], layers: int, seed: int) -> list[Trajectory]:
    """The trajectories with random experts, one token in five without, the last always without."""
    rng = np.random.default_rng(seed)
    out = []
    for t in batch:
        routes = np.argsort(rng.random((t.num_tokens, layers, EXPERTS)), -1)[..., :TOPK].astype(np.uint8)
        routes[rng.random(t.num_tokens) < 0.2] = 255
        routes[-1] = 255
        out.append(dataclasses.replace(t, routed_experts=routes))
    return out


def run(policy: Policy, layout: Layout) -> dict[str, Any]:
    """Recorded routes, log-probs under forced ones, and two steps with those."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    layouts._gpt_model = _gpt_model
    trainer: Trainer = layouts.build(policy, layout)
    step = trainer.step
    step.replay = RouterReplay(trainer.model, trainer.groups)
    batches = [_routed(trajectories(seed), step.replay.num_layers, seed) for seed in (0, 1)]
    call = {"model": trainer.model, "forward_backward": get_forward_backward_func()}
    bare = [dataclasses.replace(t, routed_experts=None) for t in batches[0]]
    recorded = with_trainer_routes(
        [bare[:5], bare[5:]], step=step, num_experts=EXPERTS, device=torch.device("cpu"), **call
    )
    logprobs = step.logprobs_of(batches[0], **call)
    metrics = [trainer.train(batch, lag=float(lag)) for lag, batch in enumerate(batches)]
    return {
        "layers": step.replay.layer_numbers,
        "routes": [torch.from_numpy(t.routed_experts) for minibatch in recorded for t in minibatch],
        "logprobs": {index: torch.from_numpy(values) for index, values in logprobs.items()},
        "metrics": metrics,
        "weights": trainer.weights(),
    }


def compare_routes_and_steps(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["layers"] == theirs["layers"]
    for mine, expected in zip(ours["routes"], theirs["routes"], strict=True):
        assert torch.equal(mine.sort(-1).values, expected.sort(-1).values)
    seen = torch.zeros(len(theirs["logprobs"]))
    for index, values in ours["logprobs"].items():
        seen[index] = 1.0
        torch.testing.assert_close(values, theirs["logprobs"][index], rtol=0.0, atol=LOGPROB_TOLERANCE)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    assert seen.all(), "a trajectory was scored by no rank"
    compare(ours, theirs)


def main() -> None:
    reference = torch.load(sys.argv[1])
    with worker():
        for layout, name in LAYOUTS:
            with check(f"{name} with {layout}"):
                compare_routes_and_steps(run(POLICIES[name], layout), reference[name])


if __name__ == "__main__":
    main()
