"""The whole loop for real: Megatron's pretrain(), vLLM, rewards, loss, weight sync; on one process and on two.

One short supervised run gives the weights that every other run starts from.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from examples.char_tokenizer import write_char_tokenizer
from megatron_vcpo.observability.metrics import read_metrics
from tests.oracle.forked import forked_python

pytestmark = [pytest.mark.engine, pytest.mark.distributed]

ROOT = Path(__file__).parents[2]
MODEL = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--ffn-hidden-size", "128"),
    *("--seq-length", "32", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    "--untie-embeddings-and-output-weights",
]
TASK = [
    *("--rollout-environment", "sort_digits", "--rollout-max-response-length", "8"),
    *("--rollout-environment-config", '{"n_digits": 3, "prompt_template": "{digits}:"}'),
    *("--lr-decay-style", "constant", "--rollout-quiet"),
]
ROLLOUT = [
    *("--lr", "3e-4", "--finetune", "--rollout-prompts-per-step", "4", "--rollout-responses-per-prompt", "4"),
    *("--vcpo-tokens-per-micro-batch", "128", "--rollout-engine-kv-cache-bytes", str(1 << 26)),
]
# Resumed to the bit in the same layout, and loaded by another one.
SHARDED = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
# The same on every layout; wall time and what a layout may differ in by its nature are left out.
COMPARED = (
    "reward",
    "rho",
    "lr",
    "lr_multiplier",
    "loss",
    "grad_norm",
    "baseline",
    "advantage_abs",
    "entropy",
    "weight",
)


def launch(module: str, *flags: str, processes: int = 1) -> str:
    """Run a module of the package; its output, or a failure with the end of it."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    python = forked_python(vllm=module == "megatron_vcpo.train")
    command = [*python, "-W", "ignore", *start, "-m", module, *MODEL, *TASK, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Folder with a tokenizer and a checkpoint that knows a little."""
    folder = tmp_path_factory.mktemp("end_to_end")
    write_char_tokenizer(folder / "tokenizer")
    launch(
        "megatron_vcpo.supervised",
        *("--rollout-tokenizer", str(folder / "tokenizer"), "--train-iters", "30", "--lr", "4e-3"),
        *("--rollout-prompts-per-step", "64", "--rollout-responses-per-prompt", "1"),
        *("--vcpo-tokens-per-micro-batch", "2048"),
        *("--save", str(folder / "warm_up"), "--save-interval", "30"),
    )
    losses = [record["loss"] for record in read_metrics(folder / "warm_up")]
    assert losses[-1] < 0.6 * losses[0]
    return folder


def train(start: Path, name: str, *flags: str, processes: int = 1, fresh: bool = True) -> tuple[list[dict], str]:
    """A reinforcement run into folder `name`: (metrics, output)."""
    load = ["--load", str(start / "warm_up")] if fresh else []
    rollout = ROLLOUT if fresh else [flag for flag in ROLLOUT if flag != "--finetune"]
    output = launch(
        "megatron_vcpo.train",
        *("--rollout-tokenizer", str(start / "tokenizer")),
        *rollout,
        *load,
        *("--rollout-run-dir", str(start / name)),
        *flags,
        processes=processes,
    )
    return read_metrics(start / name), output


@pytest.fixture(scope="module")
def single(start):
    """Six steps on one process with every observer on, saved after the third and the sixth."""
    return train(
        start,
        "single",
        *("--train-iters", "6", "--rollout-max-lag", "3", "--save", str(start / "single_save"), "--save-interval", "3"),
        *("--vcpo-ess-reference", "auto", "--rollout-save-trajectories", "1000"),
        *("--rollout-eval-interval", "3", "--rollout-eval-num-prompts", "8"),
        *("--tensorboard-dir", str(start / "tensorboard"), "--tensorboard-log-interval", "1"),
        *SHARDED,
    )


def without_times(record: dict) -> dict:
    return {k: v for k, v in record.items() if not k.startswith(("time/", "eval/")) and k != "train_iters" and v == v}


def test_a_run_learns_from_rollouts_of_the_age_it_says(single):
    metrics, output = single
    assert [record["iteration"] for record in metrics] == [0, 1, 2, 3, 4, 5, 6]
    steps = metrics[1:]
    assert [record["lag_max"] for record in steps] == [0, 1, 2, 3, 0, 1]
    assert [record["version"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert all(record["n_trajectories"] == 16 and record["skipped"] == 0 for record in steps)
    for record in steps:
        fresh = record["lag_max"] == 0
        assert (record["mismatch_kl"] < 1e-9) == fresh, record
        assert 0.0 < record["rho"] <= 1.0
    assert [record["iteration"] for record in metrics if "eval/reward" in record] == [0, 3, 6]
    assert "rho" in output
    assert "lag" in output


def test_megatrons_tensorboard_writer_got_the_metrics(start, single):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(start / "tensorboard"))
    events.Reload()
    assert {"vcpo/rho", "vcpo/reward", "vcpo/lag_max"} <= set(events.Tags()["scalars"])
    assert [round(event.value, 4) for event in events.Scalars("vcpo/rho")] == [
        round(record["rho"], 4) for record in single[0][1:]
    ]


def test_three_steps_resumed_for_three_more_equal_six_to_the_bit(start, single):
    shared = ("--rollout-max-lag", "3", "--vcpo-ess-reference", "auto", "--rollout-save-trajectories", "1000", *SHARDED)
    folder = str(start / "halves_save")
    train(start, "halves", "--train-iters", "3", *shared, "--save", folder, "--save-interval", "3")
    resumed = ("--load", folder, "--train-iters", "6", *shared)
    metrics, _ = train(start, "halves", *resumed, fresh=False)
    whole = [record for record in single[0] if record["iteration"] > 0]
    assert [without_times(record) for record in metrics] == [without_times(record) for record in whole]
    samples = [
        [json.loads(line) for line in (start / name / "samples.jsonl").read_text().splitlines()]
        for name in ("single", "halves")
    ]
    assert samples[0] == samples[1]  # the same prompts and responses in the same order
    # The fourth step trains on what was waiting in the buffer, and yet the weights were published first.
    assert metrics[3]["lag_max"] == 3
    assert metrics[3]["time/sync"] > 0.0
    assert "time/sync" not in whole[3]
    assert "time/generate" not in metrics[3]


@pytest.mark.parametrize(
    "layout",
    ["--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"],
)
def test_a_run_goes_on_in_another_layout_with_what_waited(start, single, layout):
    metrics, _ = train(
        start,
        f"moved_to_{layout.split()[0].strip('-')}",
        *("--load", str(start / "single_save"), "--ckpt-step", "3", "--train-iters", "6"),
        *("--rollout-max-lag", "3", "--vcpo-ess-reference", "auto", *layout.split(), *SHARDED),
        processes=2,
        fresh=False,
    )
    assert [record["iteration"] for record in metrics] == [4, 5, 6]
    assert metrics[0]["lag_max"] == 3  # trained on what was waiting
    for ours, theirs in zip(metrics, single[0][4:], strict=True):
        for key in COMPARED:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-4, abs=1e-6), (ours["iteration"], key)


def test_experts_and_a_kl_reference_resume_to_the_bit_on_two_processes(start):
    """Nothing is rewarded here: the entropy bonus moves the weights away from the reference."""
    flags = (
        *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64", "--qk-layernorm"),
        *("--moe-router-load-balancing-type", "none", "--expert-model-parallel-size", "2", *SHARDED),
        *("--vcpo-kl-coefficient", "0.1", "--vcpo-entropy-coefficient", "0.1", "--rollout-max-lag", "1"),
        *("--train-iters", "4", "--save-interval", "2"),
    )
    saved = str(start / "experts_save")
    whole, _ = train(start, "experts", *flags, "--save", saved, processes=2, fresh=False)
    resumed, _ = train(start, "experts_on", *flags, "--load", saved, "--ckpt-step", "2", processes=2, fresh=False)
    assert [record["iteration"] for record in resumed] == [3, 4]
    assert all(record["skipped"] == 0 and record["grad_norm"] > 0.0 and record["kl"] > 0.0 for record in resumed)
    assert [without_times(record) for record in resumed] == [without_times(record) for record in whole[-2:]]


def test_an_engine_in_a_process_of_its_own_gives_the_same_samples_and_steps_to_the_bit(start, single):
    metrics, _ = train(
        start,
        "engine_process",
        *("--train-iters", "6", "--rollout-max-lag", "3", "--vcpo-ess-reference", "auto"),
        *("--rollout-save-trajectories", "1000", "--rollout-eval-interval", "3", "--rollout-eval-num-prompts", "8"),
        *("--rollout-engine-placement", "process", "--sync-verify", "every-2", *SHARDED),
    )
    assert [without_times(record) for record in metrics] == [without_times(record) for record in single[0]]
    assert [r["eval/reward"] for r in metrics if "eval/reward" in r] == [
        r["eval/reward"] for r in single[0] if "eval/reward" in r
    ]
    samples = [(start / name / "samples.jsonl").read_text() for name in ("single", "engine_process")]
    assert samples[0] == samples[1]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (
            "tensor_and_sequence_parallel_with_a_two_rank_engine",
            "--tensor-model-parallel-size 2 --sequence-parallel --rollout-engine-tensor-parallel-size 2",
        ),
        ("pipeline_parallel", "--pipeline-model-parallel-size 2"),
        ("context_parallel", "--context-parallel-size 2"),
        (
            "data_parallel_with_distributed_optimizer_and_overlap",
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ),
        ("data_parallel_with_an_engine_process_for_each_rank", "--rollout-engine-placement process"),
    ],
)
def test_two_processes_compute_what_one_does(start, single, name, flags):
    metrics, _ = train(
        start,
        name,
        "--train-iters",
        "3",
        "--rollout-max-lag",
        "3",
        "--vcpo-ess-reference",
        "auto",
        *flags.split(),
        processes=2,
    )
    for ours, theirs in zip(metrics, single[0][1:4], strict=True):
        for key in COMPARED:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-4, abs=1e-6), (ours["iteration"], key)


@pytest.mark.parametrize("precision", ["--fp16 --initial-loss-scale 128", "--bf16"])
def test_half_precision_runs_with_penalties_and_minibatch_baseline(start, precision):
    metrics, _ = train(
        start,
        precision.split()[0].strip("-"),
        *("--train-iters", "3", "--rollout-max-lag", "1", "--vcpo-kl-coefficient", "0.01"),
        *("--vcpo-entropy-coefficient", "0.001", "--vcpo-baseline-scope", "minibatch"),
        *("--vcpo-reward-normalization", "minibatch-std"),
        *precision.split(),
    )
    assert [record["skipped"] for record in metrics] == [0, 0, 0]
    assert all(0.0 < record["rho"] <= 1.0 and record["grad_norm"] > 0.0 for record in metrics)
    assert metrics[0]["kl"] < 1e-3
    assert metrics[0]["mismatch_abs"] < 0.05


def test_exact_energies_train_over_two_processes_and_change_nothing_but_the_baseline(start, single):
    metrics, _ = train(
        start,
        "exact",
        *("--train-iters", "2", "--rollout-max-lag", "3", "--vcpo-ess-reference", "auto", "--vcpo-energy", "exact"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        processes=2,
    )
    ours, with_logits = metrics[0], single[0][1]
    for key in ("reward", "rho", "lr", "entropy", "weight"):
        assert ours[key] == pytest.approx(with_logits[key], rel=2e-4, abs=1e-6), key
    assert ours["baseline"] != pytest.approx(with_logits["baseline"], rel=1e-4)
    assert ours["baseline"] == pytest.approx(with_logits["baseline"], abs=0.2)
    assert ours["baseline_fallbacks"] == with_logits["baseline_fallbacks"]
    assert all(record["skipped"] == 0 and record["grad_norm"] > 0.0 for record in metrics)
