"""VLLMRoutes: which experts vLLM chose for each token of its responses.

On a GPU they come from vLLM's own flag, on a CPU from hooks of its routers. One request at the engine's start checks
that routes really come: with a flag that is accepted but does nothing, the mismatch would stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_vcpo.data.routes import RouteArray, compact_routes
from megatron_vcpo.engines.protocol import EngineError
from megatron_vcpo.patches import vllm_cpu_routed_experts

_PROBE_PROMPT, _PROBE_TOKENS = [0, 1, 2], 2


def engine_flags(on_cpu: bool) -> dict[str, Any]:
    """Arguments for vLLM's LLM to make it return routes."""
    return {} if on_cpu else {"enable_return_routed_experts": True}


class VLLMRoutes:
    """Reads the routes of one engine's responses; refuses an engine that returns none, at its start."""

    def __init__(self, llm: Any, *, on_cpu: bool) -> None:
        """Args: llm: vLLM's LLM, built with `engine_flags`. Raises EngineError if it returns no valid routes."""
        self._layers: list[int] = llm.collective_rpc(_expert_layers)[0]
        if not self._layers:
            raise EngineError("--rollout-router-replay rollout: the engine's model has no experts; drop the flag.")
        config = llm.llm_engine.model_config
        self._num_experts, self._k = int(config.get_num_experts()), int(config.get_num_experts_per_tok())
        self._capture = llm.collective_rpc(vllm_cpu_routed_experts.watch)[0] if on_cpu else None
        self._probe(llm)

    def begin(self) -> None:
        """Call before requests whose routes will be read."""
        if self._capture is not None:
            self._capture.clear()

    def take(self, outputs: Sequence[Any]) -> list[RouteArray]:
        """Routes [P + L, layers with experts, k] of finished requests, the last token's row (and others that vLLM did
        not keep) marked as missing. Raises EngineError, naming the request, if they are missing or impossible."""
        try:
            return [self._one(number, output) for number, output in enumerate(outputs)]
        finally:
            self.begin()

    def _one(self, number: int, output: Any) -> RouteArray:
        completion = output.outputs[0]
        tokens = len(output.prompt_token_ids) + len(completion.token_ids)
        if self._capture is not None:
            found = self._capture.rows(output.request_id, tokens)
        elif completion.routed_experts is None:
            found = np.zeros((0, len(self._layers), self._k), np.int16)
        else:
            found = np.asarray(completion.routed_experts)[:, self._layers]
        if found.shape[1:] != (len(self._layers), self._k):
            raise EngineError(
                f"vLLM's routes of request {number} have the shape {found.shape}; expected are {len(self._layers)} "
                f"layers with {self._k} experts each."
            )
        try:
            return compact_routes(found[:tokens], num_experts=self._num_experts, rows=tokens)
        except ValueError as error:
            raise EngineError(f"vLLM's routes of request {number} cannot be right: {error}.") from error

    def _probe(self, llm: Any) -> None:
        """Check with one request that every token that went through the model comes back with its experts."""
        from vllm import SamplingParams

        prompt = [{"prompt_token_ids": _PROBE_PROMPT}]
        self.begin()
        params = SamplingParams(max_tokens=_PROBE_TOKENS, ignore_eos=True, temperature=0.0)
        routes = self.take(llm.generate(prompt, params, use_tqdm=False))[0].astype(np.int16)
        missing = 255 if self._num_experts <= 255 else -1
        if (routes[:-1] == missing).any():
            raise EngineError(
                "--rollout-router-replay rollout: the engine returns no routed experts for this model; use "
                "--rollout-router-replay training, or off."
            )


def _expert_layers(worker: Any) -> list[int]:
    """Numbers, from 0, of the layers with experts in the engine's model."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    return sorted(module.layer_id for module in worker.model_runner.model.modules() if isinstance(module, MoERunner))
