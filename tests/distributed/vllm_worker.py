"""Run by test_vllm_engines.py under torchrun over gloo, two processes: an engine each, then one engine over both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_vcpo.engines.protocol import GenerationRequest, Sampling
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from tests.oracle import tiny_models


def gathered(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """As a sharded trainer sends them: a collective of all ranks for each tensor."""
    for name, tensor in tensors.items():
        mine = tensor / dist.get_world_size()
        dist.all_reduce(mine)
        yield name, mine


def check(folder: Path, engine_size: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    before = torch.get_rng_state()
    engine = VLLMEngine(
        VLLMSettings(
            model_dir=str(folder / "0"),
            dtype="float32",
            max_model_len=128,
            kv_cache_bytes=64 << 20,
            tensor_parallel_size=engine_size,
        )
    )
    place = rank // engine_size
    # Engines of one rank each get different numbers of requests: nothing may wait for the other one.
    requests = [GenerationRequest(prompt_ids=[20, 14, 21 + place], seed=10 * place + i) for i in range(3 + 4 * place)]
    for which in (0, 1, 0):
        engine.update_weights(gathered(load_file(folder / str(which) / "model.safetensors")), which)
        model = tiny_models.load(folder / str(which))
        results = engine.generate(requests, Sampling(max_tokens=16), progress=False)
        assert len(results) == len(requests)
        for request, result in zip(requests, results, strict=True):
            ids = [*request.prompt_ids, *result.response_ids.tolist()]
            difference = np.abs(result.logprobs - tiny_models.logprobs(model, ids, 3)).max()
            assert difference < 1e-4, (which, difference)
    assert torch.equal(before, torch.get_rng_state())
    engine.shutdown()
    total = torch.ones(1)
    dist.all_reduce(total)  # the trainer's groups outlive the engine
    assert total.item() == dist.get_world_size()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    check(folder, 1)
    check(folder, dist.get_world_size())
    if dist.get_rank() == 0:
        print("engines agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
