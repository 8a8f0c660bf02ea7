"""vLLM in the trainer's process: each data-parallel rank (or tensor-parallel group of ranks) holds its own engine.

Weights come only from `update_weights`: the engine starts with random ones and refuses to generate before the first
complete update. Log-probs are vLLM's processed ones, under the distribution that a token was actually sampled from.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from megatron_vcpo.config import ConfigError
from megatron_vcpo.data.routes import RouteArray
from megatron_vcpo.data.trajectory import Float32Array
from megatron_vcpo.engines.log import EngineLog, logging_variables
from megatron_vcpo.engines.process_state import EngineTurn
from megatron_vcpo.engines.protocol import EngineError, GenerationRequest, GenerationResult, Sampling
from megatron_vcpo.engines.vllm.routes import VLLMRoutes, engine_flags
from megatron_vcpo.engines.vllm.weights import WeightLoader
from megatron_vcpo.patches import (
    vllm_cpu_amx_permission,
    vllm_cpu_int8_reload,
    vllm_cpu_int8_saturation,
    vllm_cpu_latent_rope,
    vllm_cpu_seeded_generators,
    vllm_shutdown_process_group,
)
from megatron_vcpo.runtime.private_folder import use_private_folder
from megatron_vcpo.sync.receiver import UpdateReport

_LOGPROB_EPSILON = 1e-4  # rounding may lift the log-prob of a near-certain token this far above 0

_VARIABLES = {
    # vLLM's only switch to run its engine core in this process; tensors could not be handed to a child.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSettings:
    """Settings of a vLLM engine.

    Example:
        >>> VLLMSettings(model_dir="llama", dtype="float32", max_model_len=512, kv_cache_bytes=64 << 20)
    """

    model_dir: str  # Hugging Face folder: config.json and tokenizer; its weights are not read
    dtype: Literal["float32", "float16", "bfloat16"]
    max_model_len: int  # prompt + response tokens
    kv_cache_bytes: int = 1 << 28  # per engine rank; without it, vLLM would take most of the memory
    max_sequences: int = 256  # decoded at the same time
    tensor_parallel_size: int = 1  # ranks of one engine, consecutive in the world
    seed: int = 0  # of the engine; every request has its own
    tokenizer_dir: str | None = None  # default: model_dir
    enforce_eager: bool | None = None  # default: on a CPU only; elsewhere CUDA graphs are captured
    return_routes: bool = False  # responses include the experts chosen for each token
    log_file: str | None = None  # file for what vLLM logs when it fails; default: a temporary one

    def build(self) -> VLLMEngine:
        """See `EngineSettings.build`."""
        return VLLMEngine(self)


class VLLMEngine:
    """`RolloutEngine` on vLLM. Build it on all ranks together, after torch.distributed is initialized."""

    def __init__(self, settings: VLLMSettings) -> None:
        """Start the engine, which imports vLLM and takes seconds to minutes. Raises EngineError if it cannot start."""
        self.version: int | None = None
        self.float32_weights: frozenset[str] = frozenset()
        self._settings = settings
        if not (Path(settings.model_dir) / "config.json").is_file():
            raise EngineError(f"The engine's model folder {settings.model_dir} has no config.json; check the path.")
        try:
            use_private_folder()
        except ConfigError as error:
            raise EngineError(str(error)) from error
        self._turn = EngineTurn(_VARIABLES | logging_variables())
        self._log = EngineLog(settings.log_file)
        self._llm: Any = None
        self._routes: VLLMRoutes | None = None
        self._cache_may_hold_nan = False
        # vLLM creates the default process group if there is none; then we must destroy it.
        self._owns_process_group = not torch.distributed.is_initialized()
        try:
            with self._calling(f"vLLM could not start with {settings.model_dir}"):
                self._llm = _build(settings)
                self._loader = WeightLoader(self._llm)
                self.float32_weights = self._loader.float32_names()
                if settings.return_routes:
                    self._routes = VLLMRoutes(self._llm, on_cpu=_on_cpu())
        except EngineError:
            if self._llm is None:
                self._clean_up(_forget_groups)  # otherwise the next engine would take them for its own
            self.shutdown()
            raise

    # -- weights ---------------------------------------------------------------------------------------------------

    def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], version: int, *, verify: bool = False
    ) -> UpdateReport:
        """See `WeightReceiver.update_weights`. Raises EngineError naming the tensor or the parameters left out."""
        llm = self._running()
        self.version = None
        with self._log.collecting(), self._turn:
            report = self._loader.load(weights, verify=verify)
            if self._cache_may_hold_nan:
                llm.collective_rpc(_zero_cache)
                self._cache_may_hold_nan = False
            if not llm.reset_prefix_cache():
                raise EngineError("vLLM could not reset its prefix cache after a weight update: a request is running.")
        self.version = version
        return report

    # -- generation ------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, progress: bool
    ) -> list[GenerationResult]:
        """See `Generator.generate`. Raises EngineError, naming the request, on log-probs that cannot be trained on."""
        llm = self._running()
        if self.version is None:
            raise EngineError(
                "The engine has no complete set of weights (none has come yet, or the last update failed); "
                "call update_weights() first."
            )
        if not requests:
            return []
        self._check_lengths(requests, sampling.max_tokens)
        params = [
            _sampling_params(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                stop=list(sampling.stop) or None,
                stop_token_ids=list(sampling.stop_token_ids),
                include_stop_str_in_output=True,
                # Otherwise vLLM drops special tokens before it looks for stop strings, and puts spaces between them.
                skip_special_tokens=False,
                spaces_between_special_tokens=False,
                seed=request.seed,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        if self._routes is not None:
            self._routes.begin()
        with self._calling("vLLM failed while generating"):
            outputs = llm.generate(prompts, params, use_tqdm=_progress_bar if progress else False)
        if len(outputs) != len(requests):
            raise EngineError(f"vLLM returned {len(outputs)} responses to {len(requests)} requests.")
        routes = self._routes.take(outputs) if self._routes is not None else [None] * len(outputs)
        with self._guarding_cache():
            return [
                _result(number, output, self.version, route)
                for number, (output, route) in enumerate(zip(outputs, routes))
            ]

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[Float32Array]:
        """See `Generator.score`. It does not read the prefix cache, which holds no log-probs."""
        llm = self._running()
        if self.version is None:
            raise EngineError("The engine has no complete set of weights to score with; call update_weights() first.")
        wanted = [i for i, (ids, start) in enumerate(zip(sequences, prompt_lengths, strict=True)) if len(ids) > start]
        prompts, params = [], []
        for i in wanted:
            ids, start = sequences[i], prompt_lengths[i]
            if start < 1 or len(ids) - 1 >= self._settings.max_model_len:
                raise EngineError(
                    f"Sequence {i} cannot be scored: its prompt length {start} must be at least 1 and its length "
                    f"{len(ids)} at most the engine's {self._settings.max_model_len}."
                )
            # The last token is scored as the one generated after the others: a sequence of the engine's maximum length
            # leaves no room to generate another token.
            prompts.append({"prompt_token_ids": list(ids[:-1])})
            params.append(
                _sampling_params(
                    max_tokens=1,
                    temperature=1.0,
                    seed=0,
                    prompt_logprobs=0,
                    logprobs=1,
                    logprob_token_ids=[int(ids[-1])],
                )
            )
        with self._calling("vLLM failed while scoring"):
            outputs = llm.generate(prompts, params, use_tqdm=False) if prompts else []
        scores = [np.zeros(0, np.float32) for _ in sequences]
        with self._guarding_cache():
            for i, output in zip(wanted, outputs, strict=True):
                scores[i] = _scores(f"sequence {i}", output, [int(t) for t in sequences[i]], prompt_lengths[i])
        return scores

    def shutdown(self) -> None:
        """See `Generator.shutdown`."""
        self.version = None
        llm, self._llm = self._llm, None
        if llm is not None:
            self._clean_up(llm.llm_engine.engine_core.shutdown)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _clean_up(self, release: Callable[[], None]) -> None:
        """Run a function that may destroy process groups, but keep the trainer's own groups."""
        owns = self._owns_process_group
        with self._turn, contextlib.nullcontext() if owns else vllm_shutdown_process_group.trainer_groups_kept():
            release()

    def _running(self) -> Any:
        if self._llm is None:
            raise EngineError("The engine has been shut down.")
        return self._llm

    def _check_lengths(self, requests: Sequence[GenerationRequest], max_tokens: int) -> None:
        for number, request in enumerate(requests):
            length = len(request.prompt_ids)
            if length == 0 or length + max_tokens > self._settings.max_model_len:
                raise EngineError(
                    f"Request {number} has {length} prompt tokens and may take {max_tokens} more; the engine needs at "
                    f"least 1 prompt token and holds {self._settings.max_model_len} in all."
                )

    @contextlib.contextmanager
    def _guarding_cache(self) -> Iterator[None]:
        """Have the next update zero the key-value cache after an error. Log-probs that are not finite mean NaN in the
        cache, and a kernel that masks unused slots by multiplying with 0 spreads it to later requests, whatever the
        weights.
        """
        try:
            yield
        except EngineError:
            self._cache_may_hold_nan = True
            raise

    @contextlib.contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Run the engine's turn, and turn whatever vLLM raises into an EngineError that names the cause."""
        with self._log.collecting(), self._turn:
            try:
                yield
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"{what}: {type(error).__name__}: {_first_sentence(error)}") from error


def _progress_bar(*args: Any, **kwargs: Any) -> tqdm:
    """vLLM's progress bar; its second one, for tokenizing, is hidden, since prompts come as tokens."""
    if kwargs.get("desc") != "Processed prompts":
        kwargs["disable"] = True
    return tqdm(*args, **kwargs | {"desc": "Generating", "leave": False})


def _zero_cache(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def _first_sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500] or "no message"


def _build(settings: VLLMSettings) -> Any:
    from vllm import LLM

    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if world % settings.tensor_parallel_size != 0:
        raise EngineError(
            f"An engine of {settings.tensor_parallel_size} tensor-parallel ranks cannot be cut out of {world} "
            "processes; --rollout-engine-tensor-parallel-size must divide their number."
        )
    vllm_cpu_latent_rope.apply()
    vllm_cpu_int8_reload.apply()
    vllm_cpu_int8_saturation.apply()
    if _on_cpu():
        vllm_cpu_amx_permission.apply()
        vllm_cpu_seeded_generators.apply()
    eager = _on_cpu() if settings.enforce_eager is None else settings.enforce_eager
    return LLM(
        model=settings.model_dir,
        tokenizer=settings.tokenizer_dir or settings.model_dir,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_sequences,
        tensor_parallel_size=settings.tensor_parallel_size,
        # This executor takes rank and device from the launcher; the default one would put every rank's engine on device
        # 0.
        distributed_executor_backend="external_launcher" if world > 1 else None,
        load_format="dummy",
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        enforce_eager=eager,
        seed=settings.seed,
        # For latent attention vLLM prefers a kernel for AMX, which supports only bfloat16; other models ignore this.
        attention_backend="CPU_MLA" if _on_cpu() else None,
        **(engine_flags(_on_cpu()) if settings.return_routes else {}),
    )


def _forget_groups() -> None:
    if "vllm.distributed.parallel_state" not in sys.modules:
        return
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _sampling_params(**fields: Any) -> Any:
    from vllm import SamplingParams

    # logprobs=0 returns only the sampled token's; flat lists save one object per token.
    return SamplingParams(logprobs=fields.pop("logprobs", 0), flat_logprobs=True, **fields)


def _checked(name: str, logprobs: Sequence[float]) -> Float32Array:
    values = np.asarray(logprobs, dtype=np.float32)
    bad = ~np.isfinite(values) | (values > _LOGPROB_EPSILON)
    if bad.any():
        position = int(bad.argmax())
        raise EngineError(
            f"vLLM gave {name} the log-prob {values[position]} at response token {position}; a log-prob is finite and "
            "at most 0. Are the engine's weights sound in its data type?"
        )
    return np.minimum(values, np.float32(0.0))


def _result(number: int, output: Any, version: int, routes: RouteArray | None = None) -> GenerationResult:
    completion = output.outputs[0]
    ids = np.asarray(completion.token_ids, dtype=np.int32)
    sampled = completion.logprobs.token_ids
    if completion.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended request {number} with reason {completion.finish_reason!r} before it was done.")
    if len(sampled) != len(ids) or not np.array_equal(ids, sampled):
        raise EngineError(f"vLLM returned {len(sampled)} log-probs for the {len(ids)} tokens of request {number}.")
    return GenerationResult(
        response_ids=ids,
        logprobs=_checked(f"request {number}", completion.logprobs.logprobs),
        versions=np.full(len(ids), version, np.int32),  # weights change only between calls
        text=completion.text,
        truncated=completion.finish_reason == "length",
        routed_experts=routes,
    )


def _scores(name: str, output: Any, ids: Sequence[int], start: int) -> Float32Array:
    values = []
    for position in range(start, len(ids) - 1):
        values.append(output.prompt_logprobs[position][ids[position]].logprob)
    values.append(output.outputs[0].logprobs[0][ids[-1]].logprob)
    return _checked(name, values)
