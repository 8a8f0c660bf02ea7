"""Conversions in processes of their own: killed and resumed, and measured for memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_vcpo.checkpoint.convert.source import MegatronSource
from megatron_vcpo.checkpoint.convert.to_hf import convert_to_hf
from megatron_vcpo.checkpoint.convert.to_megatron import ConversionOptions, convert_to_megatron
from megatron_vcpo.checkpoint.torch_dist import TorchDistFolder
from megatron_vcpo.models.errors import CheckpointError
from tests.oracle.forked import forked_python
from tests.oracle.model_pairs import save_hf_model

OPTIONS = ConversionOptions(shard_bytes=20_000)


def worker(*words: str | Path, python: Sequence[str] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    command = [*python, "-W", "ignore", str(Path(__file__).with_name("convert_worker.py")), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_a_killed_conversion_does_not_load_and_goes_on_to_the_same_bytes(tmp_path: Path, megatron_groups: Any) -> None:
    hf = tmp_path / "hf"
    save_hf_model(hf, "qwen3_moe", tied=False)
    whole = tmp_path / "whole" / "out"
    convert_to_megatron(hf, whole, OPTIONS).folder.commit()

    target = tmp_path / "killed" / "out"
    done = worker("kill", hf, target, 60_000, python=forked_python())
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert not target.exists()
    partial = target.with_name("out.partial")
    finished = {p.name: p.stat().st_mtime_ns for p in (partial / "release").glob("*.distcp")}
    assert 2 <= len(finished) < len(list((whole / "release").glob("*.distcp")))
    for folder in (partial, partial / "release"):
        with pytest.raises(CheckpointError):
            TorchDistFolder(folder)

    result = convert_to_megatron(hf, target, OPTIONS)
    for name, written in finished.items():
        assert (partial / "release" / name).stat().st_mtime_ns == written, f"{name} was written again"
    result.folder.commit()
    expected, actual = contents(whole), contents(target)
    flags = expected.pop("megatron_flags.sh"), actual.pop("megatron_flags.sh")
    assert flags[0].replace(bytes(whole), b"") == flags[1].replace(bytes(target), b"")
    assert actual == expected


def test_an_interrupted_export_does_not_load_and_goes_on_to_the_same_bytes(
    tmp_path: Path, megatron_groups: Any
) -> None:
    save_hf_model(tmp_path / "hf", "llama", tied=True)
    megatron = tmp_path / "megatron"
    convert_to_megatron(tmp_path / "hf", megatron, OPTIONS).folder.commit()
    convert_to_hf(MegatronSource(megatron), tmp_path / "whole", OPTIONS).folder.commit()

    written = 0

    def interrupt(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if written > 40_000:
            raise KeyboardInterrupt

    target, partial = tmp_path / "out", tmp_path / "out.partial"
    with pytest.raises(KeyboardInterrupt):
        convert_to_hf(MegatronSource(megatron), target, OPTIONS, progress=interrupt)
    finished = list(partial.glob("*.safetensors"))
    assert len(finished) >= 2
    assert not target.exists()
    assert not (partial / "config.json").exists()
    assert not (partial / "model.safetensors.index.json").exists()
    (partial / ".tmpQx3Yz1").write_bytes(b"half")  # what safetensors leaves where it is killed
    convert_to_hf(MegatronSource(megatron), target, OPTIONS).folder.commit()
    assert contents(target) == contents(tmp_path / "whole")


def test_a_source_that_changed_in_between_is_noticed(tmp_path: Path, megatron_groups: Any) -> None:
    save_hf_model(tmp_path / "hf", "llama", tied=True)
    convert_to_megatron(tmp_path / "hf", tmp_path / "out", OPTIONS).folder.close()
    save_hf_model(tmp_path / "hf", "llama", tied=True, seed=1)
    with pytest.raises(CheckpointError, match="a conversion with another files"):
        convert_to_megatron(tmp_path / "hf", tmp_path / "out", OPTIONS)


@pytest.mark.slow
def test_memory_stays_far_below_the_model(tmp_path: Path) -> None:
    """About 400 MB in one file; files of 16 MB come out. Largest tensors: 23 MB (gate and up), 16 MB (embedding)."""
    hidden, ffn, layers, vocab = 1024, 2816, 8, 4096
    save_hf_model(
        tmp_path / "hf",
        "llama",
        tied=False,
        vocab_size=vocab,
    )
    path = tmp_path / "hf" / "config.json"
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes | heads))
    state = {"model.embed_tokens.weight": torch.rand(vocab, hidden), "lm_head.weight": torch.rand(vocab, hidden)}
    state["model.norm.weight"] = torch.rand(hidden)
    for layer in range(layers):
        shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (256, hidden),
            "self_attn.v_proj": (256, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        state |= {f"model.layers.{layer}.{name}.weight": torch.rand(shape) for name, shape in shapes.items()}
    size = sum(tensor.nbytes for tensor in state.values())
    assert size > 390e6
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    del state
    done = worker("memory", tmp_path / "hf", tmp_path / "megatron", tmp_path / "back")
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = json.loads(done.stdout.splitlines()[-1])
    print(f"model {size / 1e6:.0f} MB, above the start: {[f'{name} {n / 1e6:.0f} MB' for name, n in peaks.items()]}")
    stored = sum(file.stat().st_size for file in (tmp_path / "megatron").rglob("*.distcp"))
    assert size < stored < 1.01 * size  # no part is saved with the whole it is a view of
    assert peaks["to_megatron"] < 0.4 * size, peaks
    assert peaks["to_hf"] < 0.4 * size, peaks
