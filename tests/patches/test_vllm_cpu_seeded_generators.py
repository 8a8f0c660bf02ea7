"""A seeded response does not depend on how its prompt was cut, and only because of the patch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_vcpo.engines.protocol import EngineError, GenerationRequest, Sampling
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from megatron_vcpo.patches import vllm_cpu_seeded_generators
from tests.oracle import tiny_models

UNCUT = 100_000  # tokens that one step may compute
PROMPTS = [
    [20, 14, 21, 32],
    *([start + i * step % 90 for i in range(250)] for start, step in ((5, 1), (6, 7), (7, 11), (8, 13))),
    [5 + i % 90 for i in range(150)],  # the beginning of another one
    [40],
]
REQUESTS = [GenerationRequest(prompt_ids=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
SAMPLING = Sampling(max_tokens=40)
SCORED = [[*prompt, 9, 10] for prompt in PROMPTS]
BLOCK = 2 * 2 * 128 * 32 * 4  # bytes: 2 layers' keys and values of 128 tokens, 1 head of 32, float32
ENOUGH = 64 << 20


class Drawn:
    """What one engine gave."""

    def __init__(self, engine: VLLMEngine) -> None:
        results = engine.generate(REQUESTS, SAMPLING, progress=False)
        self.tokens = [result.response_ids.tolist() for result in results]
        self.logprobs = np.concatenate([result.logprobs for result in results])
        self.scores = np.concatenate(engine.score(SCORED, [len(prompt) for prompt in PROMPTS]))


@contextlib.contextmanager
def engine_with(
    folder: Any, monkeypatch: pytest.MonkeyPatch, budget: int, cache: int = ENOUGH, log: Any = None
) -> Iterator[VLLMEngine]:
    import vllm

    with monkeypatch.context() as patch:
        patch.setattr(vllm, "LLM", functools.partial(vllm.LLM, max_num_batched_tokens=budget))
        engine = VLLMEngine(
            VLLMSettings(
                model_dir=str(folder),
                dtype="float32",
                max_model_len=512,
                kv_cache_bytes=cache,
                max_sequences=16,
                log_file=None if log is None else str(log),
            )
        )
    try:
        engine.update_weights(iter(load_file(folder / "model.safetensors").items()), 0)
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_models.save("llama", 0, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def uncut(folder: Any) -> tuple[Drawn, Drawn]:
    """Whole prompts: with the patch, and as vLLM draws them without it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM's CPU backend is not the one in use")
    with pytest.MonkeyPatch.context() as monkeypatch, engine_with(folder, monkeypatch, UNCUT) as engine:
        patched = Drawn(engine)
        with without_the_patch(monkeypatch):
            return patched, Drawn(engine)


@contextlib.contextmanager
def without_the_patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    with monkeypatch.context() as patch:
        patch.setattr(CPUModelRunner, "sample_tokens", CPUModelRunner.sample_tokens.__wrapped__)
        yield


def assert_same(given: Drawn, expected: Drawn) -> None:
    assert given.tokens == expected.tokens
    np.testing.assert_allclose(given.logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_allclose(given.scores, expected.scores, atol=1e-4)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of requests in parts at each step that had any."""
    counts: list[int] = []
    stock = vllm_cpu_seeded_generators.unwanted_generators_hidden

    def counted(runner: Any) -> Any:
        if number := int(runner.discard_request_mask.np[: runner.input_batch.num_reqs].sum()):
            counts.append(number)
        return stock(runner)

    monkeypatch.setattr(vllm_cpu_seeded_generators, "unwanted_generators_hidden", counted)
    return counts


@pytest.mark.engine
def test_whole_prompts_draw_what_they_drew_without_the_patch(uncut: tuple[Drawn, Drawn]) -> None:
    patched, stock = uncut
    assert patched.tokens == stock.tokens
    np.testing.assert_array_equal(patched.logprobs, stock.logprobs)
    assert max(map(len, patched.tokens)) > 8
    assert len({tuple(tokens) for tokens in patched.tokens}) == len(PROMPTS)


@pytest.mark.engine
@pytest.mark.parametrize("budget", [64, 1000])
def test_prompts_in_parts_draw_what_whole_ones_draw(
    uncut: tuple[Drawn, Drawn], cut: list[int], folder: Any, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    with engine_with(folder, monkeypatch, budget) as engine:
        assert_same(Drawn(engine), uncut[0])
    assert cut


@pytest.mark.engine
def test_recomputed_responses_go_on_as_they_would_have(
    uncut: tuple[Drawn, Drawn], cut: list[int], folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too small a cache for all: responses give it up, and are computed again in parts of 64 tokens."""
    with engine_with(folder, monkeypatch, 64, cache=6 * BLOCK) as engine:
        scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
        preempted, preempt = [], scheduler._preempt_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.append(request.num_output_tokens)
            preempt(request, *args, **kwargs)

        monkeypatch.setattr(scheduler, "_preempt_request", noted)
        assert_same(Drawn(engine), uncut[0])
    assert cut
    assert max(preempted) > 0


@pytest.mark.engine
def test_a_prompt_in_parts_still_ends_the_engine(
    uncut: tuple[Drawn, Drawn], folder: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What vLLM then dumps is in the file that the error names, and nowhere else."""
    log = folder / "engine.log"
    said = f"CPU Generator does not use offset. What it logged is in {log}."
    with (
        engine_with(folder, monkeypatch, 64, log=log) as engine,
        without_the_patch(monkeypatch),
        pytest.raises(EngineError, match=said),
    ):
        engine.generate(REQUESTS, SAMPLING, progress=False)
    written, printed = log.read_text(), "".join(capfd.readouterr())
    for part in ("Dumping input data", "Dumping scheduler output", "Traceback", "set_offset"):
        assert part in written
        assert part not in printed


def test_generators_are_hidden_for_the_sampling_alone() -> None:
    generators = {row: torch.Generator().manual_seed(row) for row in (0, 1, 3, 4)}
    before = dict(generators)
    mask = np.array([True, False, True, True, True])  # request 2 has no seed; row 4 is left from an earlier batch
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(generators=generators, num_reqs=4), discard_request_mask=SimpleNamespace(np=mask)
    )
    seen: list[int] = []

    def sample() -> None:
        with vllm_cpu_seeded_generators.unwanted_generators_hidden(runner):
            seen.extend(sorted(generators))
            raise KeyError

    with pytest.raises(KeyError):
        sample()
    assert seen == [1, 4]
    assert generators == before
    assert runner.input_batch.generators is generators
