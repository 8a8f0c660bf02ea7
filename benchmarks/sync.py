"""publish() against a plain copy of the same bytes: seconds, GB/s and peak extra memory, interleaved.

The rows: the copy; publish() into an engine that only takes the tensors, into vLLM in this process, into vLLM through
its own loader for comparison, and into vLLM in a process of its own; a forward and backward pass of the same model, to
show the share of a step. With --unpacked, vLLM keeps its weights unchanged, as on a GPU, instead of in the CPU kernels'
packed form. --no-vllm leaves vLLM out.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_vcpo.checkpoint.hf_config import hf_config_from_megatron
from megatron_vcpo.config import SyncConfig
from megatron_vcpo.engines.process import ProcessEngine
from megatron_vcpo.engines.vllm import weights as vllm_weights
from megatron_vcpo.engines.vllm.engine import VLLMEngine
from megatron_vcpo.models.description import ModelFacts, describe_megatron
from megatron_vcpo.sync.synchronizer import WeightSynchronizer
from tests.oracle.single_process import single_process_megatron


class IdleEngine:
    """Takes the tensors and does nothing with them."""

    version: int | None = None
    float32_weights: frozenset[str] = frozenset()

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        for _ in weights:
            pass
        self.version = version


def build(layers: int, hidden: int, vocab: int) -> tuple[Any, Any, ModelFacts]:
    """A Llama-type GPTModel in fp32, its configuration, and the facts that the configuration does not hold."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=hidden // 64, num_query_groups=hidden // 128,
        ffn_hidden_size=3 * hidden, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
        bias_activation_fusion=False, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=vocab, max_sequence_length=128,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    facts = ModelFacts(vocab_size=vocab, max_position_embeddings=128, rotary_base=10000, tied_embeddings=False)
    return model, config, facts


def settings(folder: Path, config: Any, facts: ModelFacts) -> Any:
    """Settings of an engine with dummy weights and a tokenizer of one letter per token."""
    import json

    from megatron_vcpo.engines.vllm.engine import VLLMSettings
    from tests.oracle.tiny_models import character_tokenizer

    fields = hf_config_from_megatron(config, facts, dtype=torch.float32)
    (folder / "config.json").write_text(json.dumps(fields))
    character_tokenizer().save_pretrained(folder)
    return VLLMSettings(model_dir=str(folder), dtype="float32", max_model_len=128, kv_cache_bytes=64 << 20)


def keep_unpacked() -> None:
    """Let vLLM's CPU layers in this process multiply with unpacked weights."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def plain(self: Any, layer: torch.nn.Module) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    LinearBase._cpu_skip_gemm_dispatch = True
    UnquantizedEmbeddingMethod.process_weights_after_loading = plain


class ThroughLoader:
    """An engine whose updates all go through vLLM's own reload."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.version: int | None = None
        self.float32_weights: frozenset[str] = frozenset()

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        loader = self._engine._loader
        plan, loader._plan = loader._plan, None
        recorder, vllm_weights.CopyRecorder = vllm_weights.CopyRecorder, NoRecorder
        try:
            self._engine.update_weights(weights, version)
        finally:
            loader._plan, vllm_weights.CopyRecorder = plan, recorder
        self.version = version


class NoRecorder(contextlib.nullcontext):
    """Records nothing, so that only the reload is measured."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.shapes: dict[str, tuple[int, ...]] = {}

    def expect(self, name: str, tensor: torch.Tensor) -> None:
        pass


def peak_extra_bytes(action: Callable[[], object]) -> int:
    """Peak memory of `action` beyond what was held before; for a CPU process, of the resident set."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmRSS")
    action()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measure(rows: dict[str, Callable[[], object]], nbytes: int, repeats: int) -> None:
    """Run the rows in turn, `repeats` times, and print medians and ratios to the first row."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    peaks = dict.fromkeys(rows, 0)
    for action in rows.values():
        action()  # the first calls allocate and compile
    for _ in range(repeats):
        for name, action in rows.items():
            started = time.perf_counter()
            peaks[name] = max(peaks[name], peak_extra_bytes(action))
            seconds[name].append(time.perf_counter() - started)
    reference = statistics.median(next(iter(seconds.values())))
    print(f"{nbytes / 1e6:.0f} MB of weights, median of {repeats}")
    print(f"{'':32}{'ms':>10}{'GB/s':>8}{'x copy':>9}{'peak extra MB':>16}")
    for name, values in seconds.items():
        median = statistics.median(values)
        rate = nbytes / median / 1e9
        print(f"{name:32}{median * 1e3:10.1f}{rate:8.2f}{median / reference:9.2f}{peaks[name] / 1e6:16.1f}")


def training_pass(model: Any, tokens: int) -> Callable[[], object]:
    """A forward and backward pass over one sequence."""
    ids = torch.randint(0, 1000, (1, tokens))
    positions = torch.arange(tokens)[None]
    causal = torch.triu(torch.ones(1, 1, tokens, tokens, dtype=torch.bool), 1)

    def run() -> None:
        model(ids, positions, causal).logsumexp(-1).mean().backward()
        model.zero_grad(set_to_none=True)

    return run


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value in {"layers": 12, "hidden": 768, "vocab": 16384, "repeats": 7, "tokens": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--no-vllm", action="store_true", help="leave out the rows of the real engine")
    parser.add_argument("--unpacked", action="store_true", help="let vLLM keep its weights as they come")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with (
        single_process_megatron() as groups,
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
    ):
        model, config, facts = build(options.layers, options.hidden, options.vocab)
        description = describe_megatron(config, facts)
        engines: dict[str, Any] = {"publish, idle engine": IdleEngine()}
        if not options.no_vllm:
            if options.unpacked:
                keep_unpacked()
            chosen = settings(Path(folder), config, facts)
            here = VLLMEngine(chosen)
            stack.callback(here.shutdown)
            engines["publish, vLLM in process"] = here
            engines["the same, by vLLM's loader"] = ThroughLoader(here)
            if not options.unpacked:
                child = ProcessEngine(chosen, rank=0, timeout=60.0, bucket_bytes=SyncConfig().bucket_bytes)
                stack.callback(child.shutdown)
                engines["publish, vLLM's own process"] = child
        shape = description.shape(options.vocab)
        syncs = {
            name: WeightSynchronizer(
                [model], description.family, shape, groups, engine, SyncConfig(), dtype=torch.float32
            )
            for name, engine in engines.items()
        }
        parameters = [p.detach() for p in model.parameters()]
        copies = [torch.empty_like(p) for p in parameters]

        def copy() -> None:
            for target, source in zip(copies, parameters):
                target.copy_(source)

        rows: dict[str, Callable[[], object]] = {"plain copy": copy}
        for name, sync in syncs.items():
            for _ in range(3):
                sync.publish(1)  # the first updates are recorded and verified
            rows[name] = lambda sync=sync: sync.publish(1)  # type: ignore[misc]
        rows[f"forward, backward, {options.tokens} tokens"] = training_pass(model, options.tokens)
        measure(rows, next(iter(syncs.values())).gatherer.nbytes, options.repeats)


if __name__ == "__main__":
    main()
