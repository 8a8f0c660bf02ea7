"""Routing replay in the whole loop: the engine's routes reach the trainer's routers, and bfloat16 shows what for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from examples.char_tokenizer import write_char_tokenizer
from megatron_vcpo.observability.metrics import read_metrics
from tests.oracle.forked import forked_python

ROOT = Path(__file__).parents[2]
FLAGS = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--ffn-hidden-size", "128"),
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64", "--qk-layernorm"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-3", "--init-method-std", "0.15"),
    *("--seq-length", "32", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--bf16"),
    *("--untie-embeddings-and-output-weights", "--lr", "1e-3", "--lr-decay-style", "constant"),
    *("--rollout-environment", "sort_digits", "--rollout-max-response-length", "16", "--rollout-quiet"),
    *("--rollout-environment-config", '{"n_digits": 3, "prompt_template": "{digits}:"}'),
    *("--rollout-prompts-per-step", "16", "--rollout-responses-per-prompt", "8", "--rollout-max-lag", "1"),
    *("--vcpo-tokens-per-micro-batch", "1024", "--rollout-engine-kv-cache-bytes", str(1 << 26)),
    *("--train-iters", "2", "--sync-verify-tolerance", "1"),
]


@pytest.mark.engine
def test_the_trainer_follows_the_engines_routes_and_comes_closer_to_it(tmp_path):
    write_char_tokenizer(tmp_path / "tokenizer")
    done = subprocess.run(
        [
            *(*forked_python(vllm=True), "-W", "ignore", "-m", "megatron_vcpo.train", *FLAGS),
            *("--rollout-router-replay", "rollout", "--rollout-tokenizer", str(tmp_path / "tokenizer")),
            *("--rollout-run-dir", str(tmp_path / "run")),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    fresh, stale = read_metrics(tmp_path / "run")
    assert fresh["route_missing"] == stale["route_missing"] == 0.0
    assert 0.0 < fresh["route_disagree_tokens"] < 0.2
    assert fresh["route_disagree_tokens"] < stale["route_disagree_tokens"]
    for record in (fresh, stale):
        for layer in (0, 1):
            assert 0.5 < record[f"route_agreement/layer_{layer}"] <= 1.0
    print({name: value for name, value in fresh.items() if name.startswith(("mismatch", "route"))})
    assert fresh["mismatch_kl_replay"] < 0.5 * fresh["mismatch_kl_no_replay"]
    assert fresh["mismatch_kl_replay"] == pytest.approx(fresh["mismatch_kl"], rel=0.05)
