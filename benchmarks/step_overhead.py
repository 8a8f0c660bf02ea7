"""One VCPO optimizer step against a plain Megatron-Core step on the same packed tokens, interleaved, CPU time.

The plain step is next-token cross-entropy on the same micro-batches: forward, backward, gradient finalization, optimizer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tests.oracle.single_process import single_process_megatron

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.mcore.packing import MicroBatch
from megatron_vcpo.rollout.trajectory import Trajectory


def make_trajectories(count: int, group: int, vocab: int, prompt: int, response: int) -> list[Trajectory]:
    """Random tokens, responses of 50% to 150% of `response`."""
    rng = np.random.default_rng(0)
    out = []
    for i in range(count):
        length = int(rng.integers(response // 2, response + response // 2))
        out.append(
            Trajectory(
                prompt_ids=rng.integers(0, vocab, prompt).astype(np.int32),
                response_ids=rng.integers(0, vocab, length).astype(np.int32),
                behavior_logprobs=(-np.log(vocab) + 0.02 * rng.standard_normal(length)).astype(np.float32),
                versions=np.zeros(length, np.int32),
                response_mask=np.ones(length, bool),
                reward=float(rng.integers(0, 2)),
                group_id=i // group,
                index=i % group,
            )
        )
    return out


def build(groups: Any, layers: int, hidden: int, vocab: int, sequence: int) -> tuple[list[Any], Any, Any]:
    """A Llama-type model with Adam."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_vcpo.optim import EssParamScheduler
    from patches.cpu_packed_attention import PackedCoreAttention

    config = TransformerConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=hidden // 64, ffn_hidden_size=3 * hidden,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, bias_activation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, moe_token_dispatcher_type="alltoall", normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        calculate_per_token_loss=True, variable_seq_lengths=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    gpt = GPTModel(
        config, spec, vocab_size=vocab, max_sequence_length=sequence, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    model = [DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-5, weight_decay=0.1, clip_grad=1.0), model)
    scheduler = EssParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-5, min_lr=1e-5, lr_warmup_steps=0, lr_decay_steps=1000,
        lr_decay_style="constant", start_wd=0.1, end_wd=0.1, wd_incr_steps=1000, wd_incr_style="constant",
    )  # fmt: skip
    return model, optimizer, scheduler


def plain_forward(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Megatron's own loss on the same micro-batch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    micro = next(data_iterator)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro.cu_seqlens,
        cu_seqlens_kv=micro.cu_seqlens,
        max_seqlen_q=micro.max_seqlen,
        max_seqlen_kv=micro.max_seqlen,
    )
    losses = model(micro.tokens, micro.position_ids, None, labels=micro.labels, packed_seq_params=packed)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        mask = micro.response_mask.float()
        total = (output.float().view(-1) * mask).sum()
        return total, mask.sum().int(), {"lm loss": torch.stack([total.detach().clone(), mask.sum()])}

    return losses, loss


def step(model: list[Any], optimizer: Any, forward: Any, batches: list[MicroBatch], sequence: int) -> tuple[bool, Any]:
    """Forward, backward, finalization and update."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=sequence,
        micro_batch_size=1,
        forward_only=False,
    )
    success, grad_norm, _ = optimizer.step()
    return success, grad_norm


def main() -> None:
    """Print the table."""
    import megatron_vcpo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value in dict(layers=6, hidden=512, vocab=16384, trajectories=32, group=8, prompt=32, response=96,
                            repeats=9).items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sequence = (options.prompt + 2 * options.response) * options.group
    with single_process_megatron() as groups:
        from megatron.core.distributed import finalize_model_grads

        model, optimizer, scheduler = build(groups, options.layers, options.hidden, options.vocab, sequence)
        trajectories = make_trajectories(
            options.trajectories, options.group, options.vocab, options.prompt, options.response
        )
        transformer = model[0].config
        transformer.finalize_model_grads_func = None
        plain_step = optimizer.step
        settings = dict(
            model=model, optimizer=optimizer, scheduler=scheduler, groups=groups, vocab_size=options.vocab,
            sequence_length=sequence, max_response_length=2 * options.response,
        )  # fmt: skip
        ways = {
            "vcpo, opob with logit energy": VCPOConfig(),
            "vcpo, group mean": VCPOConfig(baseline="mean"),
            "vcpo, opob over the minibatch (scoring pass)": VCPOConfig(baseline_scope="minibatch"),
        }
        steps: dict[str, Callable[[], None]] = {}
        for name, config in ways.items():
            transformer.finalize_model_grads_func, optimizer.step = None, plain_step
            vcpo = megatron_vcpo.register(config, **settings)
            steps[name] = vcpo_step(vcpo, transformer, optimizer, model, scheduler, trajectories, sequence)
        from megatron.core.pipeline_parallel import get_forward_backward_func

        vcpo.begin(trajectories, model=model, forward_backward=get_forward_backward_func())
        batches = list(vcpo.data_iterator())

        def plain() -> None:
            transformer.finalize_model_grads_func, optimizer.step = finalize_model_grads, plain_step
            step(model, optimizer, plain_forward, batches, sequence)

        measure({"plain Megatron-Core step": plain, **steps}, options.repeats)
        rows = sum(batch.tokens.size(1) for batch in batches)
        print(f"{rows} rows in {len(batches)} micro-batches, {sum(p.numel() for p in model[0].parameters()) / 1e6:.0f}M parameters")


def vcpo_step(
    vcpo: Any, transformer: Any, optimizer: Any, model: list[Any], scheduler: Any, trajectories: Any, sequence: int
) -> Callable[[], None]:
    """A whole step: packing, forward, backward, reductions, update."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    hooks = transformer.finalize_model_grads_func, optimizer.step

    def run() -> None:
        transformer.finalize_model_grads_func, optimizer.step = hooks
        vcpo.begin(trajectories, model=model, forward_backward=get_forward_backward_func())
        success, grad_norm = step(model, optimizer, vcpo.forward_step, list(vcpo.data_iterator()), sequence)
        scheduler.step(len(trajectories))
        vcpo.end(success=success, grad_norm=grad_norm)

    return run


def measure(ways: dict[str, Callable[[], None]], repeats: int) -> None:
    """Run the ways in turn and print CPU seconds and ratios to the first."""
    for run in ways.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    base = seconds[next(iter(ways))]
    print(f"{'way':<48} {'CPU s (median)':>15} {'ratio':>7}  of {repeats} interleaved runs")
    for name, values in seconds.items():
        ratio = statistics.median(v / b for v, b in zip(values, base))
        print(f"{name:<48} {statistics.median(values):>15.3f} {ratio:>7.3f}")


if __name__ == "__main__":
    main()
