"""The report against transformers' log-probs, and the precision of the types with the real engine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_vcpo.commands import mismatch_report
from megatron_vcpo.data.saved_batch import Origin, save_batch
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.patches import megatron_cpu, torch_cuda_alias
from tests.oracle import tiny_models

pytestmark = pytest.mark.slow

megatron_cpu.install()

VERSION = 7
PLAIN = Origin(version=VERSION, temperature=1.0, engine_dtype="float32", trainer_dtype="float32", router_replay="off")


def trajectory(index: int, ids: Sequence[int], start: int, logprobs: np.ndarray, **changes: Any) -> Trajectory:
    length = len(ids) - start
    fields: dict[str, Any] = {
        "prompt_ids": np.array(ids[:start], np.int32),
        "response_ids": np.array(ids[start:], np.int32),
        "behavior_logprobs": logprobs.astype(np.float32),
        "versions": np.full(length, VERSION, np.int32),
        "response_mask": np.ones(length, np.bool_),
        "reward": 1.0,
        "group_id": index,
        "index": 0,
    }
    return Trajectory(**fields | changes)


def random_ids(count: int = 12) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(3)
    return [(rng.integers(3, 99, int(rng.integers(12, 40))).tolist(), int(rng.integers(1, 8))) for _ in range(count)]


def batch_of(model: torch.nn.Module, temperature: float = 1.0) -> list[Trajectory]:
    """Random tokens, recorded with transformers' log-probs in fp32."""
    return [
        trajectory(i, ids, start, tiny_models.logprobs(model, ids, start, temperature))
        for i, (ids, start) in enumerate(random_ids())
    ]


def changed(folder: Path, target: Path, size: float) -> torch.nn.Module:
    """The model with noise on every weight, saved beside its tokenizer."""
    model = tiny_models.load(folder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(target)
    tiny_models.character_tokenizer().save_pretrained(target)
    return model


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[dict[str, list[str]], str]:
    """Rows of the table by name, and the whole text."""
    assert mismatch_report.main([*map(str, words), "--quiet"]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    rows = {line[:22].strip(): line[22:].split() for line in text.splitlines() if len(line) > 22 and line[0].isalpha()}
    return rows, text


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", 0, tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("moe", 0, tmp_path_factory.mktemp("moe") / "model")


def test_staleness_and_temperature_are_those_that_transformers_gives(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    temperature = 0.7
    sampler, policy = tiny_models.load(dense), changed(dense, tmp_path / "policy", 0.02)
    batch = batch_of(sampler, temperature)
    stale = dataclasses.replace(batch[0], versions=batch[0].versions - 1)
    save_batch(tmp_path / "b.npz", [*batch, stale], dataclasses.replace(PLAIN, temperature=temperature))
    rows, text = run(capsys, tmp_path / "b.npz", dense, "--policy", tmp_path / "policy", "--dtypes", "float32")

    def everywhere(at: float) -> np.ndarray:
        return np.concatenate([tiny_models.logprobs(policy, ids, start, at) for ids, start in random_ids()])

    recorded = np.concatenate([t.behavior_logprobs for t in batch])
    staleness = np.abs(everywhere(temperature) - recorded)
    assert float(rows["staleness"][0]) == pytest.approx(staleness.mean(), rel=0.06)  # two digits are shown
    assert float(rows["staleness"][2]) == pytest.approx(staleness.max(), rel=0.06)
    transform = np.abs(everywhere(1.0) - everywhere(temperature)).mean()
    assert float(rows["sampling transform"][0]) == pytest.approx(transform, rel=0.06)
    assert rows["sampling transform"][3:5] == ["temperature", "0.7"]
    assert float(rows["rest"][0]) < 1e-5
    assert rows["routing"][0] == "none"
    assert rows["cache"][:2] == ["not", "measured"]
    assert "12 of 13 trajectories\n" in text
    assert "lower --rollout-max-lag" in text
    assert (tmp_path / "b.png").is_file()


def test_a_megatron_checkpoint_is_read_like_the_one_it_was_made_from(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_vcpo.checkpoint.convert.to_megatron import ConversionOptions, convert_to_megatron
    from megatron_vcpo.models.building.offline import single_process

    with single_process():
        convert_to_megatron(dense, tmp_path / "megatron", ConversionOptions()).folder.commit()
    save_batch(tmp_path / "b.npz", batch_of(tiny_models.load(dense)), PLAIN)
    rows, text = run(capsys, tmp_path / "b.npz", tmp_path / "megatron", "--dtypes", "float16", "bfloat16")
    assert float(rows["all together"][0]) < 1e-5
    assert "Nothing to turn" in text
    assert float(rows["bfloat16 against fp32"][0]) > 4 * float(rows["float16 against fp32"][0]) > 0.0
    assert rows["staleness"][:2] == ["not", "measured"]
    assert rows["sampling transform"][0] == "none"


def test_routes_of_the_batch_are_replayed_and_other_experts_are_the_routing_row(
    moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_vcpo.diagnostics.mismatch.scores import TrainerModel, open_weights
    from megatron_vcpo.models.building.offline import single_process

    batch = batch_of(tiny_models.load(moe))
    with single_process():
        model = TrainerModel(open_weights(moe), "float32")
        own = model.with_own_routes(batch)
        exact = model.score(batch, temperature=1.0)
        other = [dataclasses.replace(t, routed_experts=(t.routed_experts + 1) % 4) for t in own]
        foreign = model.score(other, temperature=1.0, routed=True)
    origin = dataclasses.replace(PLAIN, router_replay="rollout")
    recorded = np.concatenate([t.behavior_logprobs for t in batch])
    np.testing.assert_allclose(exact, recorded, atol=2e-5)
    for name, trajectories, scores in (("own", own, exact), ("other", other, foreign)):
        save_batch(tmp_path / f"{name}.npz", trajectories, origin)
        rows, _ = run(capsys, tmp_path / f"{name}.npz", moe, "--dtypes", "float32")
        assert float(rows["routing"][0]) == pytest.approx(np.abs(scores - exact).mean(), rel=0.06, abs=1e-6)
        seen = np.abs(scores - recorded).mean()
        assert float(rows["as training sees it"][0]) == pytest.approx(seen, rel=0.06, abs=1e-6)
        assert float(rows["precision of trainer"][0]) < 1e-6  # the same experts on both sides of the switch
        assert float(rows["all together"][0]) < 1e-5  # every router choosing itself, as transformers does
    assert np.abs(foreign - exact).mean() > 0.05


@pytest.mark.engine
def test_with_experts_fp16_brings_trainer_and_engine_much_closer_than_bf16(
    moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    from megatron_vcpo.engines.protocol import GenerationRequest, Sampling
    from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings

    prompts = [ids[:start] for ids, start in random_ids(24)]
    engine = VLLMEngine(VLLMSettings(model_dir=str(moe), dtype="bfloat16", max_model_len=64, kv_cache_bytes=16 << 20))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(moe / "model.safetensors").items()}
    engine.update_weights(iter(tensors.items()), VERSION)
    requests = [GenerationRequest(prompt_ids=prompt, seed=i) for i, prompt in enumerate(prompts)]
    results = engine.generate(requests, Sampling(max_tokens=24), progress=False)
    engine.shutdown()
    if megatron_cpu.active():
        torch_cuda_alias.hide_cuda()  # what vLLM's import undoes
    batch = [
        trajectory(i, [*prompt, *result.response_ids.tolist()], len(prompt), result.logprobs)
        for i, (prompt, result) in enumerate(zip(prompts, results))
    ]
    half = dataclasses.replace(PLAIN, engine_dtype="bfloat16", trainer_dtype="bfloat16")
    save_batch(tmp_path / "b.npz", batch, half)
    rows, text = run(capsys, tmp_path / "b.npz", moe, "--engine", "--dtypes", "float16", "bfloat16")
    for kind in ("against fp32", ", both sides"):
        gap = {dtype: float(rows[f"{dtype}{' ' * (kind[0] != ',')}{kind}"][0]) for dtype in ("float16", "bfloat16")}
        assert gap["bfloat16"] > 4 * gap["float16"] > 0.0
    for name in ("routing", "precision of trainer", "precision of engine", "cache"):
        assert re.fullmatch(r"-?[\d.]+%", rows[name][3]), name
    shares = [float(rows[n][3][:-1]) for n in ("routing", "precision of trainer", "precision of engine", "cache")]
    assert sum(shares) == pytest.approx(100.0, abs=0.3)
    assert "--fp16 --rollout-engine-dtype float16" in text or "--rollout-router-replay rollout" in text


@pytest.mark.parametrize("case", ["no batch", "no checkpoint", "another model", "other version"])
def test_what_cannot_be_read_ends_with_code_1_and_one_sentence(
    case: str, dense: Path, moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = batch_of(tiny_models.load(dense))[:2]
    origin = dataclasses.replace(PLAIN, version=VERSION + (case == "other version"))
    if case != "no batch":
        save_batch(tmp_path / "b.npz", batch, origin)
    words: list[str] = [str(tmp_path / "b.npz"), str(tmp_path / "none" if case == "no checkpoint" else dense)]
    if case == "another model":
        words += ["--policy", str(moe)]
    assert mismatch_report.main([*words, "--quiet"]) == 1
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence.startswith("mismatch_report: ")
    assert sentence.endswith(".")
    assert not (tmp_path / "b.png").exists()


def test_what_a_quantized_engine_sampled_is_not_taken_for_a_fault_of_the_cache(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = batch_of(changed(dense, tmp_path / "rounded", 0.01))  # in the place of rounded weights
    save_batch(tmp_path / "b.npz", batch, dataclasses.replace(PLAIN, quantized=True))
    rows, text = run(capsys, tmp_path / "b.npz", dense, "--dtypes", "float32")
    assert rows["cache"][:2] == ["not", "measured"]
    assert float(rows["rest"][0]) > 1e-3
    assert "quantization, precision of engine and cache, together" in text
    assert "drop --rollout-engine-quantization" in text
