"""The real vLLM engine against transformers, for a model with an output layer of its own and for a tied one.

The tests of one model share its engine and run in this order; each leaves it with a complete set of weights.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_vcpo.engines.protocol import EngineError, GenerationRequest, Sampling
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from megatron_vcpo.runtime.private_folder import use_private_folder
from tests.oracle import tiny_models

pytestmark = pytest.mark.engine

LIMIT = 256
LONG = [5 + i % 90 for i in range(200)]  # more than one cache block (128 tokens on a CPU)
PROMPTS = [[20, 14, 21, 32], LONG, [40], LONG[:150], [20, 14, 21, 33]]


class Checkpoints:
    """Two sets of weights of one model."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.models = [tiny_models.load(folder / str(seed)) for seed in (0, 1)]
        self.tensors = [load_file(folder / str(seed) / "model.safetensors") for seed in (0, 1)]

    def stream(self, which: int) -> Iterator[tuple[str, torch.Tensor]]:
        """As a trainer sends them: through one piece of memory, overwritten as soon as the next tensor is asked for."""
        bucket = torch.empty(max(tensor.numel() for tensor in self.tensors[which].values()))
        for name, tensor in self.tensors[which].items():
            bucket.fill_(123.0)
            view = bucket[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view
        bucket.fill_(123.0)


def save_both(kind: str, folder) -> Checkpoints:
    for seed in (0, 1):
        tiny_models.save(kind, seed, folder / str(seed))
    return Checkpoints(folder)


@pytest.fixture(scope="module", params=["llama", "llama-tied"])
def checkpoints(request, tmp_path_factory) -> Checkpoints:
    return save_both(request.param, tmp_path_factory.mktemp(request.param))


def global_state() -> dict[str, object]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state()[1].tobytes(),
        "python": random.getstate(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": dict(os.environ),
        "cpus": os.sched_getaffinity(0),
    }


@pytest.fixture(scope="module")
def states() -> list[dict[str, object]]:
    """What the process looked like before and after the engine was built."""
    return []


@pytest.fixture(scope="module")
def engine(checkpoints, states) -> Iterator[VLLMEngine]:
    settings = VLLMSettings(
        model_dir=str(checkpoints.folder / "0"), dtype="float32", max_model_len=LIMIT, kv_cache_bytes=64 << 20
    )
    torch.manual_seed(77)
    had_groups = torch.distributed.is_initialized()
    use_private_folder()  # as a run does at its start: the only variables that stay
    states.append(global_state())
    engine = VLLMEngine(settings)
    states.append(global_state())
    yield engine
    engine.shutdown()
    engine.shutdown()
    assert torch.distributed.is_initialized() == had_groups


def requests(prompts=PROMPTS, seed: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_ids=prompt, seed=seed + i) for i, prompt in enumerate(prompts)]


def largest_difference(engine, model, temperature: float = 1.0) -> float:
    results = engine.generate(requests(), Sampling(max_tokens=24, temperature=temperature), progress=False)
    return max(
        np.abs(
            result.logprobs
            - tiny_models.logprobs(model, prompt + result.response_ids.tolist(), len(prompt), temperature)
        ).max()
        for prompt, result in zip(PROMPTS, results, strict=True)
    )


def test_engine_without_weights_refuses_to_generate_and_to_score(engine):
    assert engine.version is None
    with pytest.raises(EngineError, match="update_weights"):
        engine.generate(requests(), Sampling(max_tokens=4), progress=False)
    with pytest.raises(EngineError, match="update_weights"):
        engine.score([[5, 6, 7]], [1])


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("layers.1.self_attn.k_proj", "layers.1.self_attn.qkv_proj"),  # a part of a fused parameter
        ("layers.0.mlp.", "layers.0.mlp.gate_up_proj"),  # a whole layer, whose kernel keeps a packed copy
        ("embed_tokens", "embed_tokens"),
        ("norm.weight", "norm"),
    ],
)
def test_first_update_that_leaves_a_parameter_out_is_refused_by_name(engine, checkpoints, left_out, named):
    with pytest.raises(EngineError, match=named):
        engine.update_weights(((n, t) for n, t in checkpoints.stream(0) if left_out not in n), 0)
    assert engine.version is None


def test_two_consecutive_updates_each_give_the_logprobs_of_transformers(engine, checkpoints):
    for version, model in enumerate(checkpoints.models):
        engine.update_weights(checkpoints.stream(version), version)
        assert engine.version == version
        assert largest_difference(engine, model) < 1e-4
        assert largest_difference(engine, model, temperature=0.7) < 1e-4


def test_long_cached_prompts_meet_the_new_weights_after_an_update(engine, checkpoints):
    engine.update_weights(checkpoints.stream(0), 0)
    largest_difference(engine, checkpoints.models[0])  # fills the prefix cache
    engine.update_weights(checkpoints.stream(1), 1)
    assert largest_difference(engine, checkpoints.models[1]) < 1e-4


def test_scores_equal_transformers_up_to_the_length_limit_and_with_the_prompt_in_the_cache(engine, checkpoints):
    sequences = [[*LONG, 9, 10, 11], [*LONG, 9], [5 + i % 80 for i in range(LIMIT)], [8, 9], [8, 9]]
    starts = [len(LONG), len(LONG), 1, 1, 2]
    for _ in range(2):
        scores = engine.score(sequences, starts)
        assert [len(score) for score in scores] == [3, 1, LIMIT - 1, 1, 0]
        for score, ids, start in zip(scores[:-1], sequences, starts, strict=False):
            np.testing.assert_allclose(score, tiny_models.logprobs(checkpoints.models[1], ids, start), atol=1e-4)


def test_a_seed_decides_its_response_whatever_the_batch_and_its_order(engine):
    sampling = Sampling(max_tokens=24)
    together = engine.generate(requests(), sampling, progress=False)
    for order in ([4, 2], [3, 1, 0], [2]):
        again = engine.generate([requests()[i] for i in order], sampling, progress=False)
        for result, i in zip(again, order, strict=True):
            np.testing.assert_array_equal(result.response_ids, together[i].response_ids)
    other = engine.generate(requests(seed=100), sampling, progress=False)
    assert any(a.response_ids.tolist() != b.response_ids.tolist() for a, b in zip(other, together, strict=True))


def test_end_of_text_is_part_of_the_response_and_of_its_text(engine, checkpoints):
    prompts = [[20, 14, 21, 32]] * 300
    results = engine.generate(requests(prompts), Sampling(max_tokens=20), progress=False)
    ended = [result for result in results if not result.truncated]
    assert len(ended) > 5
    assert all(result.response_ids[-1] == tiny_models.EOS for result in ended)
    assert all(len(result.logprobs) == len(result.response_ids) for result in results)
    assert all(result.text.endswith("<eos>") for result in ended)
    assert all(len(result.response_ids) == 20 for result in results if result.truncated)
    assert any(result.text == "<eos>" for result in ended)  # an empty response


def test_stop_string_ends_a_response_and_stays_in_it(engine):
    free = engine.generate(requests(), Sampling(max_tokens=24), progress=False)[0]
    stop = free.text[5:7]
    assert "<" not in stop
    result = engine.generate(requests(), Sampling(max_tokens=24, stop=(stop,)), progress=False)[0]
    assert result.text == free.text[: free.text.index(stop) + 2]
    assert not result.truncated
    assert len(result.logprobs) == len(result.response_ids) == len(result.text)


@pytest.mark.parametrize("how", ["a special token's text", "its text among other text", "its number", "a number"])
def test_a_response_ends_with_the_first_stop_token_and_keeps_its_logprobs(engine, how):
    """`<unk>` is a special token: vLLM drops those before it looks for strings."""
    tokenizer = tiny_models.character_tokenizer()
    many = requests([PROMPTS[0]] * 48)
    free = engine.generate(many, Sampling(max_tokens=100), progress=False)
    ordinary = 40
    stops = {
        "a special token's text": ({"stop": ("<unk>",)}, [tiny_models.UNK]),
        "its number": ({"stop_token_ids": (tiny_models.UNK,)}, [tiny_models.UNK]),
        "a number": ({"stop_token_ids": (ordinary,)}, [ordinary]),
    }
    if how == "its text among other text":
        response = next(r.response_ids for r in free if tiny_models.UNK in r.response_ids[1:-2])
        place = response[1:].tolist().index(tiny_models.UNK) + 1
        pattern = response[place - 1 : place + 2].tolist()
        stops[how] = ({"stop": (tokenizer.decode(pattern),)}, pattern)
    flags, pattern = stops[how]
    results = engine.generate(many, Sampling(max_tokens=100, **flags), progress=False)
    stopped = 0
    for before, after in zip(free, results, strict=True):
        ids, length = before.response_ids.tolist(), len(pattern)
        ends = [i + length for i in range(len(ids)) if ids[i : i + length] == pattern]
        expected = ids[: ends[0]] if ends else ids
        assert after.response_ids.tolist() == expected
        assert after.truncated == (before.truncated and not ends)
        np.testing.assert_allclose(after.logprobs, before.logprobs[: len(expected)], atol=1e-5)
        stopped += bool(ends)
    assert stopped


def test_greedy_takes_the_most_likely_token(engine, checkpoints):
    result = engine.generate(requests([LONG]), Sampling(max_tokens=5, temperature=0.0), progress=False)[0]
    with torch.no_grad():
        logits = checkpoints.models[1](torch.tensor([LONG + result.response_ids.tolist()])).logits[0]
    assert logits[len(LONG) - 1 : -1].argmax(-1).tolist() == result.response_ids.tolist()


def test_requests_that_cannot_fit_are_refused_by_number(engine):
    with pytest.raises(EngineError, match="Request 1 has 200 prompt tokens"):
        engine.generate(requests(), Sampling(max_tokens=57), progress=False)
    with pytest.raises(EngineError, match="Request 0 has 0 prompt tokens"):
        engine.generate(requests([[]]), Sampling(max_tokens=5), progress=False)
    assert engine.generate([], Sampling(max_tokens=5), progress=False) == []


def failing(weights: Iterator[tuple[str, torch.Tensor]], after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number, item in enumerate(weights):
        if number == after:
            raise RuntimeError("the gather broke")
        yield item


def misshapen(weights: Iterator[tuple[str, torch.Tensor]], seen: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        seen.append(name)
        yield name, tensor[:3] if "layers.0.self_attn.k_proj" in name else tensor


def test_producer_that_fails_leaves_no_version_and_the_next_update_heals(engine, checkpoints):
    names = list(checkpoints.tensors[0])
    for after in range(1, len(names), 3):
        with pytest.raises(EngineError, match=f"{names[after - 1]}.*the gather broke"):
            engine.update_weights(failing(checkpoints.stream(0), after), 2)
        assert engine.version is None
    with pytest.raises(EngineError, match="update_weights"):
        engine.generate(requests(), Sampling(max_tokens=4), progress=False)
    engine.update_weights(checkpoints.stream(1), 3)
    assert largest_difference(engine, checkpoints.models[1]) < 1e-4


def test_tensor_that_vllm_refuses_is_named_and_the_producer_is_read_to_its_end(engine, checkpoints):
    seen: list[str] = []
    with pytest.raises(EngineError, match=r"layers\.0\.self_attn\.k_proj"):
        engine.update_weights(misshapen(checkpoints.stream(0), seen), 4)
    assert engine.version is None
    assert seen == list(checkpoints.tensors[0])
    engine.update_weights(checkpoints.stream(1), 5)
    assert largest_difference(engine, checkpoints.models[1]) < 1e-4


def test_update_that_sends_a_tensor_twice_is_refused(engine, checkpoints):
    def doubled():
        for name, tensor in checkpoints.stream(1):
            yield name, tensor
            if "layers.1.self_attn.q_proj" in name:
                yield name, tensor

    with pytest.raises(EngineError, match=r"layers\.1\.self_attn\.q_proj.*twice"):
        engine.update_weights(doubled(), 6)
    assert engine.version is None
    engine.update_weights(checkpoints.stream(1), 6)


def test_weights_that_overflow_are_an_error_of_the_request_and_leave_no_nan_in_the_cache(engine, checkpoints):
    broken = [(n, torch.full_like(t, torch.nan) if "layers.1" in n else t) for n, t in checkpoints.tensors[1].items()]
    engine.update_weights(iter(broken), 7)
    with pytest.raises(EngineError, match="request 0"):
        engine.generate(requests([[40, 41]]), Sampling(max_tokens=4), progress=False)
    engine.update_weights(checkpoints.stream(1), 8)
    assert largest_difference(engine, checkpoints.models[1]) < 1e-4


def test_the_trainer_finds_its_process_as_it_left_it(engine, checkpoints, states):
    assert states[-2] == states[-1]
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    try:
        before = global_state()
        engine.update_weights(checkpoints.stream(1), 9)
        engine.generate(requests(), Sampling(max_tokens=4), progress=False)
        engine.score([[5, 6, 7]], [1])
        assert global_state() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)


def test_engine_that_cannot_start_says_why_in_one_sentence(checkpoints, tmp_path):
    with pytest.raises(EngineError, match=r"has no config\.json"):
        VLLMEngine(VLLMSettings(model_dir=str(tmp_path), dtype="float32", max_model_len=LIMIT))
    with pytest.raises(EngineError, match=r"vLLM could not start with .*513"):
        VLLMEngine(VLLMSettings(model_dir=str(checkpoints.folder / "0"), dtype="float32", max_model_len=513))
