"""Routes of the real vLLM engine against the router of transformers, and the probe at the start."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_vcpo.data.routes import signed_routes
from megatron_vcpo.engines.protocol import EngineError, GenerationRequest, Sampling
from megatron_vcpo.engines.vllm import routes as vllm_routes
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from tests.oracle import tiny_models

LONG = [5 + i % 90 for i in range(200)]  # more than one cache block (128 tokens on a CPU)
PROMPTS = [[20, 14, 21, 32], LONG, [40], LONG[:150], LONG, [20, 14, 21, 33]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    for seed in (0, 1):
        tiny_models.save("moe", seed, folder / str(seed))
    return folder


def settings(folder, **changes) -> VLLMSettings:
    fields = {"model_dir": str(folder), "dtype": "float32", "max_model_len": 256, "kv_cache_bytes": 64 << 20}
    return VLLMSettings(**fields | {"return_routes": True} | changes)


@torch.no_grad()
def own_routes(model, ids: list[int]) -> np.ndarray:
    """[tokens, layers, k], sorted: the experts that transformers' router takes."""
    logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    best = torch.stack([layer.view(len(ids), -1).topk(2, -1).indices for layer in logits], 1)
    return best.sort(-1).values.numpy()


@pytest.mark.engine
def test_routes_of_every_token_are_those_of_the_models_router(folder):
    """With prompts that the prefix cache holds, after a score, and again after other weights."""
    engine = VLLMEngine(settings(folder / "0"))
    requests = [GenerationRequest(prompt_ids=prompt, seed=i) for i, prompt in enumerate(PROMPTS)]
    try:
        for version in (0, 1):
            engine.update_weights(iter(load_file(folder / str(version) / "model.safetensors").items()), version)
            model = tiny_models.load(folder / str(version))
            engine.score([LONG[:140]], [1])  # leaves a block in the prefix cache whose routes nobody asked for
            for _ in range(2):
                results = engine.generate(requests, Sampling(max_tokens=24), progress=False)
                for prompt, result in zip(PROMPTS, results, strict=True):
                    ids = prompt + result.response_ids.tolist()
                    routes = result.routed_experts
                    assert routes.dtype == np.uint8
                    assert routes.shape == (len(ids), 2, 2)
                    assert (routes[-1] == 255).all()  # sampled, never processed
                    np.testing.assert_array_equal(np.sort(routes[:-1], -1), own_routes(model, ids)[:-1])
    finally:
        engine.shutdown()


@pytest.mark.engine
def test_a_dense_model_cannot_return_routes(tmp_path):
    with pytest.raises(EngineError, match="model has no experts"):
        VLLMEngine(settings(tiny_models.save("llama", 0, tmp_path)))


# ------------------------------------------------------------------ without an engine


class FakeLLM:
    """Answers the probe with the given routes of its completion, as vLLM on a GPU would."""

    def __init__(self, routes, num_experts=8, layers=(1, 3)) -> None:
        config = SimpleNamespace(get_num_experts=lambda: num_experts, get_num_experts_per_tok=lambda: 2)
        self.llm_engine = SimpleNamespace(model_config=config)
        self.routes, self.layers = routes, list(layers)

    def collective_rpc(self, _function):
        return [self.layers]

    def generate(self, prompts, _params, use_tqdm):
        return [self.output(prompts[0]["prompt_token_ids"])]

    def output(self, prompt):
        completion = SimpleNamespace(token_ids=[7, 8], routed_experts=self.routes)
        return SimpleNamespace(request_id="0", prompt_token_ids=prompt, outputs=[completion])


def all_layers(rows=4, layers=4, k=2) -> np.ndarray:
    """As vLLM's flag gives them: every layer, dense ones as zeros, and no row for the last token."""
    routes = np.zeros((rows, layers, k), np.uint8)
    for layer in (1, 3):
        routes[:, layer] = [[(layer + t + i) % 8 for i in range(k)] for t in range(rows)]
    return routes


def test_only_layers_with_experts_are_kept_of_what_the_flag_returns():
    llm = FakeLLM(all_layers())
    taken = vllm_routes.VLLMRoutes(llm, on_cpu=False).take([llm.output([0, 1, 2])])[0]
    assert taken.shape == (5, 2, 2)
    np.testing.assert_array_equal(signed_routes(taken)[:4], all_layers()[:, [1, 3]])
    assert (signed_routes(taken)[4] == -1).all()
    assert vllm_routes.engine_flags(on_cpu=False) == {"enable_return_routed_experts": True}


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (None, "returns no routed experts"),
        (all_layers(rows=3), "returns no routed experts"),
        (all_layers(k=3), "expected are 2 layers with 2 experts"),
        (np.zeros((4, 4, 2), np.uint8), "request 0 cannot be right: a token was routed to one expert twice"),
        (all_layers() + 8, "an expert 15 among the routes, of 8"),
    ],
)
def test_an_engine_that_returns_no_sound_routes_is_refused_at_the_start(routes, said):
    with pytest.raises(EngineError, match=said):
        vllm_routes.VLLMRoutes(FakeLLM(routes), on_cpu=False)
