"""publish() against a plain copy of the same bytes: seconds, GB/s and peak extra memory, in one process, interleaved.

The rows: the copy, publish() into an engine that only takes the tensors, and into vLLM (leave it out with --no-vllm).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_vcpo.checkpoint.description import ModelFacts, describe_megatron
from megatron_vcpo.checkpoint.hf_config import hf_config_from_megatron
from megatron_vcpo.config import SyncConfig
from megatron_vcpo.sync.synchronizer import WeightSynchronizer
from tests.oracle.single_process import single_process_megatron


class IdleEngine:
    """Takes the tensors and does nothing with them."""

    version: int | None = None

    def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        for _ in weights:
            pass
        self.version = version


def build(layers: int, hidden: int, vocab: int) -> tuple[Any, Any, ModelFacts]:
    """A Llama-type GPTModel in fp32, its configuration and the facts beside it."""
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


def build_vllm(folder: Path, config: Any, facts: ModelFacts) -> Any:
    """The real engine with dummy weights and a tokenizer of one letter per token."""
    import json

    from megatron_vcpo.rollout.vllm_engine import VLLMEngine, VLLMSettings
    from tests.oracle.tiny_models import character_tokenizer

    fields = hf_config_from_megatron(config, facts, dtype=torch.float32)
    (folder / "config.json").write_text(json.dumps(fields))
    character_tokenizer().save_pretrained(folder)
    return VLLMEngine(VLLMSettings(model_dir=str(folder), dtype="float32", max_model_len=128, kv_cache_bytes=64 << 20))


def peak_extra_bytes(action: Callable[[], object]) -> int:
    """Memory that `action` needs at its peak beyond what was held before it (a CPU process: of the resident set)."""
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
    """Run the rows in turn, `repeats` times, and print medians against the first row."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    peaks = dict.fromkeys(rows, 0)
    for action in rows.values():
        action()  # first calls allocate and compile
    for _ in range(repeats):
        for name, action in rows.items():
            started = time.perf_counter()
            peaks[name] = max(peaks[name], peak_extra_bytes(action))
            seconds[name].append(time.perf_counter() - started)
    reference = statistics.median(next(iter(seconds.values())))
    print(f"{nbytes / 1e6:.0f} MB of weights, median of {repeats}")
    print(f"{'':28}{'ms':>10}{'GB/s':>8}{'x copy':>9}{'peak extra MB':>16}")
    for name, values in seconds.items():
        median = statistics.median(values)
        rate = nbytes / median / 1e9
        print(f"{name:28}{median * 1e3:10.1f}{rate:8.2f}{median / reference:9.2f}{peaks[name] / 1e6:16.1f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value in {"layers": 12, "hidden": 768, "vocab": 16384, "repeats": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--no-vllm", action="store_true", help="leave out the row of the real engine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with single_process_megatron() as groups, tempfile.TemporaryDirectory() as folder:
        model, config, facts = build(options.layers, options.hidden, options.vocab)
        description = describe_megatron(config, facts)
        engines: dict[str, Any] = {"publish, idle engine": IdleEngine()}
        if not options.no_vllm:
            engines["publish, vLLM in process"] = build_vllm(Path(folder), config, facts)
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
            rows[name] = lambda sync=sync: sync.publish(1)  # type: ignore[misc]
        measure(rows, next(iter(syncs.values())).gatherer.nbytes, options.repeats)
        if not options.no_vllm:
            engines["publish, vLLM in process"].shutdown()


if __name__ == "__main__":
    main()
