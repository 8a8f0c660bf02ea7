"""Training with a quantized rollout engine, and the batch that it saves: the whole loop for real."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_vcpo.checkpoint.hf_config import megatron_flags_for
from megatron_vcpo.commands import quantize_for_rollout
from megatron_vcpo.data.saved_batch import batch_path, load_batch
from megatron_vcpo.observability.metrics import read_metrics
from megatron_vcpo.patches.vllm_cpu_int8_saturation import is_exact
from tests.oracle import tiny_models
from tests.oracle.forked import forked_python

pytestmark = [pytest.mark.engine, pytest.mark.distributed]

ROOT = Path(__file__).parents[2]
TASK = ("--environment-config", '{"n_digits": 3, "prompt_template": "{digits}:"}')


def sums_saturate() -> bool:
    """Whether this processor's INT8 kernel needs patches/vllm_cpu_int8_saturation.py."""
    import vllm._custom_ops as ops

    create, multiply = inspect.unwrap(ops.create_onednn_scaled_mm), inspect.unwrap(ops.onednn_scaled_mm)
    return not is_exact(create, multiply, 64, 64, torch.float32)


def test_a_run_on_int8_rollouts_learns_from_weights_that_are_quantized_at_every_sync(tmp_path: Path) -> None:
    pytest.importorskip("modelopt", reason="needs nvidia-modelopt")
    model = tiny_models.save("llama", 0, tmp_path / "model")
    quantized = tmp_path / "int8"
    amounts = ("--calibration", "32", "--measured", "8", "--response-tokens", "8")
    assert (
        quantize_for_rollout.main(
            [str(model), str(quantized), "--format", "int8", "--environment", "sort_digits", *TASK, *amounts]
        )
        == 0
    )
    flags = [
        *megatron_flags_for(model),
        *("--seq-length", "64", "--train-iters", "4", "--lr", "1e-3", "--lr-decay-style", "constant"),
        *("--rollout-environment", "sort_digits", "--rollout-environment-config", TASK[1]),
        *(
            "--rollout-max-response-length",
            "8",
            "--rollout-prompts-per-step",
            "4",
            "--rollout-responses-per-prompt",
            "4",
        ),
        *("--rollout-tokenizer", str(model), "--vcpo-load-hf", str(model), "--rollout-run-dir", str(tmp_path / "run")),
        *("--rollout-engine-kv-cache-bytes", str(1 << 26), "--rollout-quiet", "--vcpo-baseline", "mean"),
        *("--rollout-engine-quantization", str(quantized), "--rollout-save-batch", "8", "--sync-verify", "every"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [*forked_python(vllm=True), "-W", "ignore", "-m", "megatron_vcpo.train", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert ("in two halves" in " ".join(done.stderr.split())) == sums_saturate()
    metrics = read_metrics(tmp_path / "run")
    assert [record["iteration"] for record in metrics] == [1, 2, 3, 4]
    cost = json.loads((quantized / "quantization_report.json").read_text())["mismatch"]
    for version in range(4):  # each phase had its own weights, quantized like the first
        trajectories, origin = load_batch(batch_path(tmp_path / "run", version))
        assert (len(trajectories), origin.version, origin.engine_dtype) == (8, version, "float32")
    gaps = []
    for trajectory in load_batch(batch_path(tmp_path / "run", 0))[0]:
        ids = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]
        expected = tiny_models.logprobs(tiny_models.load(model), ids, len(trajectory.prompt_ids))
        gaps.append(np.abs(trajectory.behavior_logprobs - expected))
    assert 0.2 * cost["mean"] < np.concatenate(gaps).mean() < 5 * cost["mean"]
