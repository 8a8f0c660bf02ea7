"""How trajectories are made. Prefix --rollout."""

from dataclasses import dataclass
from typing import Literal

from megatron_vcpo.config.checks import (
    LARGEST_CACHE,
    LARGEST_LIST,
    LARGEST_PHASE,
    TEMPERATURES,
    WEEK,
    require,
    require_numbers,
)
from megatron_vcpo.config.staleness import Staleness


@dataclass(kw_only=True)
class RolloutConfig:
    """How trajectories are made: environment, sampling, engine, staleness, evaluation. Prefix --rollout."""

    environment: str = "reasoning_gym:chain_sum"
    """Task: 'sort_digits', 'reasoning_gym:<dataset>', 'jsonl' (with --rollout-prompts), or 'module:Class' of your
    own."""

    environment_config: str = "{}"
    """Keyword arguments of the environment, as a JSON object."""

    prompts: str | None = None
    """JSONL file with one question a line ('question'/'prompt'/'problem' and 'answer'/'solution'), for 'jsonl'."""

    eval_prompts: str | None = None
    """JSONL file of held-out questions for evaluation, for 'jsonl'."""

    chat_template: bool = False
    """Wrap each prompt as one user message with the tokenizer's chat template."""

    prompts_per_step: int = 8
    """Prompts whose responses one optimizer step consumes."""

    responses_per_prompt: int = 8
    """Responses sampled for each prompt (the group size)."""

    max_response_length: int = 256
    """Upper bound of a response. Tokens; a response that reaches it is marked truncated."""

    max_prompt_length: int | None = None
    """Upper bound of a prompt; longer ones are skipped and counted. Tokens. Default: --seq-length minus the response
    bound."""

    temperature: float = 1.0
    """Sampling temperature; behaviour and policy log-probs are both those of the tempered distribution."""

    top_p: float = 1.0
    """Nucleus sampling. Only 1.0 is accepted: the policy's log-probs are not renormalized over a nucleus."""

    top_k: int = 0
    """Top-k sampling. Only 0 (off) is accepted, for the same reason."""

    stop: list[str] | None = None
    """Strings that end a response (kept in it); special tokens count by their text. The tokens that the model's
    generation_config.json (or config.json) and the tokenizer name as the end always do."""

    stop_token_ids: list[int] | None = None
    """Further tokens that end a response (kept in it), by their numbers: for what no file of the model names."""

    max_lag: int = 0
    """Largest allowed age of a token, in optimizer steps between the policy that sampled it and the one that trains on
    it. A rollout phase feeds max_lag + 1 steps; anything older is refused and counted, never trained on."""

    steps_per_phase: int | None = None
    """Optimizer steps fed by one rollout phase. Default: max_lag + 1, or 1 where --sync-interval is above 1."""

    seed: int | None = None
    """Seed of prompts and sampling. Default: --seed."""

    tokenizer: str | None = None
    """Folder of the Hugging Face tokenizer. Default: --tokenizer-model."""

    engine_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of the engine's weights and activations; auto follows the trainer's."""

    engine_quantization: str | None = None
    """Folder that vcpo-quantize-for-rollout wrote (FP8 or INT8; in a checkout, tools/quantize_for_rollout.py): the
    engine computes in its format, and every new set of weights is quantized like it on the way."""

    engine_tensor_parallel_size: int = 1
    """Tensor-parallel ranks of one engine; must divide the number of processes."""

    engine_placement: Literal["colocated", "process"] = "colocated"
    """Where the engine of a trainer process runs: in it, taking turns, or in a process of its own on the same machine,
    which gets its weights through shared memory (CUDA IPC on a GPU)."""

    engine_kv_cache_bytes: int = 1 << 28
    """Key-value cache of one engine rank. Bytes."""

    engine_max_sequences: int = 256
    """Sequences the engine decodes at once."""

    router_replay: Literal["off", "rollout", "training"] = "off"
    """Experts that serve a rollout's tokens in training: the router's own choice (off), those that served them in the
    engine (rollout, known as R3), or those the trainer chose when the trajectories arrived (training, R2)."""

    reward_workers: int = 2
    """Processes that compute rewards, for each trainer process that generates."""

    reward_timeout: float = 10.0
    """Deadline of one reward. Seconds; a reward past it rejects that one trajectory."""

    eval_interval: int = 0
    """Evaluate on held-out prompts every so many optimizer steps (and once before the first); 0 is off."""

    eval_num_prompts: int = 64
    """Held-out prompts of one evaluation."""

    eval_samples: int = 1
    """Responses for each held-out prompt."""

    eval_temperature: float = 0.0
    """Temperature of evaluation; 0 is greedy."""

    save_trajectories: int = 0
    """Trajectories written as text to <run folder>/samples.jsonl each rollout phase; 0 is off."""

    save_batch: int = 0
    """Trajectories of each rollout phase written with all that they carry to <run folder>/trajectories/, for
    vcpo-mismatch-report (in a checkout, tools/mismatch_report.py); 0 is off."""

    run_dir: str | None = None
    """Folder for metrics.jsonl, samples, pictures and what an engine logs when it fails. Default: --save, or
    runs/<date-time>."""

    quiet: bool = False
    """No progress bars."""

    def engine_dtype_of(self, trainer: object) -> str:
        """--rollout-engine-dtype, where auto is the trainer's type (a torch.dtype)."""
        return str(trainer).removeprefix("torch.") if self.engine_dtype == "auto" else self.engine_dtype

    def staleness(self, sync_interval: int) -> Staleness:
        """What --rollout-max-lag and --rollout-steps-per-phase come to when weights are published at that interval."""
        as_old_as_allowed = self.max_lag + 1 if sync_interval == 1 else 1
        steps = as_old_as_allowed if self.steps_per_phase is None else self.steps_per_phase
        return Staleness(max_lag=self.max_lag, steps_per_phase=steps, sync_interval=sync_interval)

    def validate(self) -> None:
        """Raise ConfigError on the first setting that cannot work."""
        at_least_one = (
            *("prompts_per_step", "responses_per_prompt", "max_response_length", "max_prompt_length"),
            *("steps_per_phase", "engine_tensor_parallel_size", "engine_kv_cache_bytes", "engine_max_sequences"),
            *("reward_workers", "eval_num_prompts", "eval_samples"),
        )
        not_negative = ("max_lag", "eval_interval", "save_trajectories", "save_batch")
        lists = (
            *("prompts_per_step", "responses_per_prompt", "steps_per_phase", "eval_num_prompts", "eval_samples"),
            *("engine_tensor_parallel_size", "max_lag"),
        )
        maximum = dict.fromkeys(lists, LARGEST_LIST) | {
            "engine_kv_cache_bytes": LARGEST_CACHE,
            "engine_max_sequences": 1 << 16,
            "reward_workers": 1024,
            "seed": (1 << 32) - 1,
        }
        require_numbers(self, "rollout", dict.fromkeys(at_least_one, 1) | dict.fromkeys(not_negative, 0), maximum)
        evaluated = self.eval_num_prompts * self.eval_samples
        require(
            evaluated <= LARGEST_PHASE,
            f"--rollout-eval-num-prompts x --rollout-eval-samples = {evaluated} responses of one evaluation, and at "
            f"most {LARGEST_PHASE} are held at one time; lower one of the two.",
        )
        require(
            self.engine_placement == "colocated" or self.engine_tensor_parallel_size == 1,
            "--rollout-engine-placement process needs --rollout-engine-tensor-parallel-size 1: each trainer process "
            "has one engine process; use colocated for engines over several ranks.",
        )
        require(
            self.engine_placement == "colocated" or self.engine_quantization is None,
            "--rollout-engine-quantization needs --rollout-engine-placement colocated: weights for another process are "
            "not quantized on their way.",
        )
        require(self.temperature > 0.0, "--rollout-temperature must be above 0: greedy rollouts have no gradient.")
        low, high = TEMPERATURES
        require(
            low <= self.temperature <= high,
            f"--rollout-temperature must lie between {low} and {high}, not {self.temperature}: vLLM samples at {low} "
            "where less is asked of it, and the trainer would temper otherwise.",
        )
        require(
            all(self.stop or []),
            "--rollout-stop holds an empty string, which would end every response at once; drop it.",
        )
        require(
            self.top_p == 1.0 and self.top_k == 0,
            "--rollout-top-p other than 1 and --rollout-top-k other than 0 are refused: the policy's log-probs would "
            "not be those of the distribution that was sampled from; leave them at 1.0 and 0.",
        )
        require(
            0.0 < self.reward_timeout <= WEEK,
            "--rollout-reward-timeout must be positive and at most 604800 seconds (a week).",
        )
        require(self.eval_temperature >= 0.0, "--rollout-eval-temperature must not be negative; 0 is greedy.")
        require(
            self.eval_temperature == 0.0 or low <= self.eval_temperature <= high,
            f"--rollout-eval-temperature must be 0 (greedy) or lie between {low} and {high}.",
        )
        require(
            self.eval_samples == 1 or self.eval_temperature > 0.0,
            "--rollout-eval-samples above 1 needs --rollout-eval-temperature above 0: greedy responses are all equal.",
        )
