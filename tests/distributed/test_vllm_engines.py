"""vLLM beside a distributed trainer: an engine for each rank, and one engine over two tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle import tiny_models
from tests.oracle.torchrun import torchrun


@pytest.mark.distributed
@pytest.mark.engine
def test_engines_of_every_size_give_the_logprobs_of_transformers(tmp_path: Path) -> None:
    for seed in (0, 1):
        tiny_models.save("llama-tied", seed, tmp_path / str(seed))
    torchrun(
        Path(__file__).with_name("vllm_worker.py"), str(tmp_path), processes=2, passed="engines agree", forked=False
    )
