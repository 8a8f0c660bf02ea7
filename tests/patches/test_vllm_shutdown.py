"""A trainer's process groups outlive the engine, and only because of the patch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.oracle import tiny_models
from tests.oracle.forked import forked_python

_ROOT = Path(__file__).parents[2]
_TRAINER = """
import contextlib, sys
import torch, torch.distributed as dist
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from megatron_vcpo.patches import vllm_shutdown_process_group

if sys.argv[2] == "unpatched":
    vllm_shutdown_process_group.trainer_groups_kept = contextlib.nullcontext
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
own = dist.new_group([0])
VLLMEngine(
    VLLMSettings(model_dir=sys.argv[1], dtype="float32", max_model_len=64, kv_cache_bytes=64 << 20)
).shutdown()
dist.all_reduce(torch.ones(1))
dist.all_reduce(torch.ones(1), group=own)
print("the groups are there")
"""


def run(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    tiny_models.save("llama", 0, folder)
    return subprocess.run(
        [*forked_python(vllm=True), "-c", _TRAINER, str(folder), how],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )


_SECOND = """
import sys
from megatron_vcpo.engines.protocol import EngineError
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings

folder, dense, experts = sys.argv[1:]
if folder != "none":
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
try:
    VLLMEngine(VLLMSettings(model_dir=dense, dtype="float32", max_model_len=64, kv_cache_bytes=1 << 10))
except EngineError as error:
    print("refused:", error)
VLLMEngine(VLLMSettings(model_dir=experts, dtype="float32", max_model_len=64, kv_cache_bytes=64 << 20)).shutdown()
print("the second engine started")
"""


@pytest.mark.engine
@pytest.mark.parametrize("trainer", [False, True])
def test_an_engine_that_failed_to_start_leaves_nothing_to_the_next(tmp_path, trainer):
    """A dense model's start makes no expert group; the groups it made must not be taken for those of a mixture."""
    for model in ("llama", "moe"):
        tiny_models.save(model, 0, tmp_path / model)
    folders = [str(tmp_path) if trainer else "none", str(tmp_path / "llama"), str(tmp_path / "moe")]
    finished = subprocess.run(
        [*forked_python(vllm=True), "-c", _SECOND, *folders], cwd=_ROOT, capture_output=True, text=True, timeout=900
    )
    assert "refused: vLLM could not start" in finished.stdout, finished.stderr[-3000:]
    assert "the second engine started" in finished.stdout, finished.stderr[-3000:]


@pytest.mark.engine
def test_the_trainer_s_groups_outlive_the_engine(tmp_path):
    finished = run(tmp_path, "patched")
    assert "the groups are there" in finished.stdout, finished.stderr[-3000:]


@pytest.mark.engine
def test_shutdown_still_destroys_every_group(tmp_path):
    finished = run(tmp_path, "unpatched")
    assert "the groups are there" not in finished.stdout
    assert "process group has not been initialized" in finished.stderr
