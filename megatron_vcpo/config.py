"""Configuration: the fields of these dataclasses ARE the command-line flags.

`arguments.py` turns every field into `--<prefix>-<field-name>`; the docstring under a field is its help text and
states meaning, unit and bounds. Each class checks itself in `validate()`, which raises `ConfigError` with one
sentence that names the flag to change.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

_TEMPERATURES = (0.01, 100.0)
_LARGEST_FLOAT = 1e30  # sums and products of it are computed in fp32
_LARGEST_COUNT = 2**31 - 1  # positions and lengths are int32
_LARGEST_LIST = 1 << 20  # of what is held one by one, in lists or processes: far beyond any run, within any memory
_LARGEST_PHASE = 1 << 24  # trajectories that exist at one time, some kilobytes each
_LARGEST_CACHE = 1 << 42  # bytes
_LARGEST_BUCKET = 1 << 36  # bytes
_WEEK = 604800.0  # seconds; what waits take beyond it differs from library to library


class ConfigError(ValueError):
    """A setting that cannot work; the message is one sentence that names the flag to change."""


Correction = Literal[
    "none",
    "token-tis",
    "sequence-tis",
    "token-mis",
    "sequence-mis",
    "geometric-mis",
    "icepop",
    "cispo",
    "gspo",
    "ppo-clip",
]
Aggregation = Literal["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean"]


MASK_BOUNDS: dict[str, tuple[float, float]] = {
    "token-mis": (0.0, 8.0),
    "sequence-mis": (0.0, 8.0),
    "geometric-mis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
}
"""Bounds of the ratio outside of which these corrections drop, where no flag gives them."""


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)


def _require_numbers(config: Any, prefix: str, minimum: dict[str, int], maximum: dict[str, int]) -> None:
    """Every float finite, and integers, where they are given, at least and at most so large."""
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), f"--{prefix}-{field.name.replace('_', '-')}"
        if isinstance(value, float):
            _require(math.isfinite(value), f"{flag} must be a finite number, not {value}.")
        if isinstance(value, int) and not isinstance(value, bool):
            least, most = minimum.get(field.name), maximum.get(field.name, _LARGEST_COUNT)
            _require(least is None or value >= least, f"{flag} must be at least {least}, not {value}.")
            shown = str(value) if value < 10**30 else "a number of more than 30 digits"
            _require(value <= most, f"{flag} must be at most {most}, not {shown}.")


@dataclass(kw_only=True)
class VCPOConfig:
    """What is optimized: importance correction, ESS scaling, baseline, energies, aggregation, penalties. Prefix
    --vcpo."""

    loss: str = "megatron_vcpo.objective:vcpo_loss"
    """Import path 'module:function' of the loss; any function LossInputs -> LossOutputs."""

    correction: Correction = "sequence-tis"
    """Importance correction applied to the policy gradient (formulas: docs/corrections.md)."""

    correction_lower: float | None = None
    """Lower bound of the ratio (mis, icepop) or the lower clip distance (gspo, ppo-clip: ratio >= 1 - value; cispo:
    same).
    Dimensionless. Default: the correction's own (icepop 0.5, mis 0.0, ppo-clip 0.2, gspo 3e-4, cispo 1.0)."""

    correction_upper: float | None = None
    """Upper bound of the ratio (tis, mis, icepop) or the upper clip distance (gspo, ppo-clip, cispo: ratio <= 1 +
    value).
    Dimensionless. Default: the correction's own (tis and mis 8.0, geometric-mis 2.0, icepop 5.0, ppo-clip 0.28,
    gspo 4e-4, cispo 4.0)."""

    veto_ratio: float = 0.0
    """Drop a trajectory that holds a token whose ratio policy/behaviour is below this. Dimensionless; 0 is off."""

    ess_scaling: Literal["off", "sqrt", "linear"] = "sqrt"
    """Learning rate of a step times (rho / reference)^(1/2) for sqrt, ^1 for linear; off leaves the schedule alone."""

    ess_reference: str = "1.0"
    """rho at which the learning rate is the schedule's own: a number in (0, 1], or 'auto', the median rho over the
    first --vcpo-ess-reference-steps steps at the lowest lag."""

    ess_reference_steps: int = 16
    """Steps over which the automatic reference takes its median. Optimizer steps."""

    ess_floor: float = 0.0
    """Lower bound of rho / reference before the exponent. Dimensionless, in [0, 1]."""

    ess_weights: Literal["raw", "capped"] = "raw"
    """Sequence weights that rho is computed from: raw, or capped at --vcpo-correction-upper."""

    baseline: Literal["none", "mean", "leave-one-out", "opob", "opob-leave-one-out"] = "opob"
    """Baseline subtracted from the reward: nothing, scope mean, mean of the others, the minimum-variance one (OPOB),
    or OPOB over the others."""

    baseline_scope: Literal["group", "minibatch"] = "group"
    """Trajectories a baseline is computed over: those of one prompt, or of the whole minibatch."""

    energy: Literal["logit", "length", "exact"] = "logit"
    """Energy that weights the OPOB baseline: sum ||onehot - softmax||^2, response length, or the squared norm of the
    trajectory's whole gradient (docs/energies.md)."""

    energy_method: Literal["two-pass", "deferred", "accumulators"] = "deferred"
    """How exact energies become a gradient: a measuring backward before the step's own; one backward whose rows are
    kept until baselines are known; or one with a second gradient buffer (for --vcpo-baseline-scope minibatch)."""

    reward_normalization: Literal["none", "group-std", "minibatch-std"] = "group-std"
    """Divide (reward - baseline) by the standard deviation (population) of the rewards of the group or minibatch."""

    aggregation: Aggregation = "seq-mean-token-mean"
    """How token terms become one loss; all denominators are global over the minibatch."""

    kl_coefficient: float = 0.0
    """Weight of the KL penalty to the frozen reference (the weights at iteration 0). Dimensionless; 0 is off."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token KL estimator: k1 = log p/ref, k2 = (log p/ref)^2 / 2, k3 = ref/p - 1 - log ref/p."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus, per response token. Dimensionless; 0 is off."""

    tokens_per_micro_batch: int | None = None
    """Token budget of a packed micro-batch (prompt + response tokens of its trajectories). Default: --seq-length."""

    logit_chunk: int = 0
    """Tokens whose logits exist at one time (recomputed in backward); 0 keeps the logits of the micro-batch."""

    overflow_retries: int = 1
    """Times that the trajectories of a step which FP16 overflow skipped are trained on again, as the next step. 0
    consumes them. With a constant --loss-scale the next step mostly overflows too."""

    phase_deadline: float | None = None
    """Time that processes may wait for one another in one phase (rollouts, training, publication, ...); past it the run
    ends and names who is missing. Seconds; 0 is off. Default: nine tenths of --distributed-timeout-minutes."""

    freeze_router: bool = False
    """Train everything but the routers of a mixture of experts."""

    freeze_expert_bias: bool = False
    """Leave the expert biases of auxiliary-loss-free balancing (--moe-router-enable-expert-bias) as they are loaded."""

    load_hf: str | None = None
    """Folder of a Hugging Face checkpoint (config.json, *.safetensors) to start from; a --load checkpoint wins."""

    verify_checkpoint: Literal["on", "off"] = "on"
    """Note a checksum of every file of a checkpoint when its save is complete, and compare them before a load
    (docs/checkpoints.md says what it costs); off does neither."""

    dry_run: bool = False
    """Check every flag, print the resolved configuration, rank map and memory estimate, start nothing, exit 0."""

    dry_run_processes: int | None = None
    """Processes that the dry run checks for. Default: those of this launch."""

    def validate(self) -> None:
        """Raise ConfigError on the first setting that cannot work."""
        _require_numbers(
            self,
            "vcpo",
            {
                "ess_reference_steps": 1,
                "tokens_per_micro_batch": 1,
                "logit_chunk": 0,
                "overflow_retries": 0,
                "dry_run_processes": 1,
            },
            {"dry_run_processes": _LARGEST_LIST},
        )
        if self.ess_reference != "auto":
            try:
                reference = float(self.ess_reference)
            except ValueError:
                reference = -1.0
            _require(
                0.0 < reference <= 1.0,
                f"--vcpo-ess-reference must be a number in (0, 1] or 'auto', not {self.ess_reference!r}.",
            )
        _require(0.0 <= self.ess_floor <= 1.0, f"--vcpo-ess-floor must lie in [0, 1], not {self.ess_floor}.")
        _require(
            self.phase_deadline is None or self.phase_deadline == 0.0 or 1.0 <= self.phase_deadline <= _WEEK,
            "--vcpo-phase-deadline must lie between 1 and 604800 seconds (a week); 0 is off.",
        )
        _require(
            0.0 <= self.veto_ratio < 1.0,
            f"--vcpo-veto-ratio must lie in [0, 1), not {self.veto_ratio}: fresh samples have the ratio 1.",
        )
        _require(self.kl_coefficient >= 0.0, "--vcpo-kl-coefficient must not be negative.")
        if self.energy == "exact":
            self._validate_exact()
        _require(
            self.ess_weights == "raw" or self.correction != "none" or self.correction_upper is not None,
            "--vcpo-ess-weights capped with --vcpo-correction none needs --vcpo-correction-upper.",
        )
        for name, value in (("lower", self.correction_lower), ("upper", self.correction_upper)):
            _require(value is None or value >= 0.0, f"--vcpo-correction-{name} must not be negative.")
        if self.correction in MASK_BOUNDS:
            low, high = MASK_BOUNDS[self.correction]
            low = low if self.correction_lower is None else self.correction_lower
            high = high if self.correction_upper is None else self.correction_upper
            _require(
                low < high,
                f"--vcpo-correction-lower ({low}) must be below --vcpo-correction-upper ({high}): nothing would be "
                "trained on.",
            )
            _require(
                low <= 1.0 <= high,
                f"--vcpo-correction-lower {low} and --vcpo-correction-upper {high} leave out the ratio 1 "
                f"({self.correction}): no fresh sample would be trained on.",
            )
        _require(
            self.correction not in ("token-tis", "sequence-tis") or self.correction_upper != 0.0,
            f"--vcpo-correction-upper 0 makes every weight of {self.correction} zero; give a bound above 0.",
        )
        for name in ("kl_coefficient", "entropy_coefficient", "correction_lower", "correction_upper"):
            value, flag = getattr(self, name) or 0.0, f"--vcpo-{name.replace('_', '-')}"
            _require(abs(value) <= _LARGEST_FLOAT, f"{flag} must be at most {_LARGEST_FLOAT:g} in size, not {value:g}.")

    def _validate_exact(self) -> None:
        _require(
            self.baseline.startswith("opob"),
            f"--vcpo-energy exact weights an optimal baseline, and --vcpo-baseline is {self.baseline}: use opob or "
            "opob-leave-one-out, or drop --vcpo-energy.",
        )
        if self.energy_method == "two-pass":
            return
        method = f"--vcpo-energy-method {self.energy_method}"
        _require(
            self.correction not in ("gspo", "ppo-clip"),
            f"{method} cannot work with --vcpo-correction {self.correction}, whose gradient is not linear in the "
            "advantage; use --vcpo-energy-method two-pass.",
        )
        _require(
            self.loss == type(self).loss,
            f"{method} forms the gradient of the built-in loss; with --vcpo-loss use --vcpo-energy-method two-pass.",
        )
        _require(
            self.energy_method != "accumulators" or (self.baseline, self.baseline_scope) == ("opob", "minibatch"),
            f"{method} needs one baseline for all: --vcpo-baseline opob with --vcpo-baseline-scope minibatch; or use "
            "--vcpo-energy-method deferred.",
        )


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
    """Folder that tools/quantize_for_rollout.py wrote (FP8 or INT8): the engine computes in its format, and every new
    set of weights is quantized like it on the way."""

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
    tools/mismatch_report.py; 0 is off."""

    run_dir: str | None = None
    """Folder for metrics.jsonl, samples, pictures and what an engine logs when it fails. Default: --save, or
    runs/<date-time>."""

    quiet: bool = False
    """No progress bars."""

    def phase_steps(self, sync_interval: int) -> int:
        """Optimizer steps that one rollout phase feeds."""
        if self.steps_per_phase is not None:
            return self.steps_per_phase
        return self.max_lag + 1 if sync_interval == 1 else 1

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
        maximum = dict.fromkeys(lists, _LARGEST_LIST) | {
            "engine_kv_cache_bytes": _LARGEST_CACHE,
            "engine_max_sequences": 1 << 16,
            "reward_workers": 1024,
            "seed": (1 << 32) - 1,
        }
        _require_numbers(self, "rollout", dict.fromkeys(at_least_one, 1) | dict.fromkeys(not_negative, 0), maximum)
        evaluated = self.eval_num_prompts * self.eval_samples
        _require(
            evaluated <= _LARGEST_PHASE,
            f"--rollout-eval-num-prompts x --rollout-eval-samples = {evaluated} responses of one evaluation, and at "
            f"most {_LARGEST_PHASE} are held at one time; lower one of the two.",
        )
        _require(
            self.engine_placement == "colocated" or self.engine_tensor_parallel_size == 1,
            "--rollout-engine-placement process needs --rollout-engine-tensor-parallel-size 1: each trainer process "
            "has one engine process; use colocated for engines over several ranks.",
        )
        _require(
            self.engine_placement == "colocated" or self.engine_quantization is None,
            "--rollout-engine-quantization needs --rollout-engine-placement colocated: weights for another process are "
            "not quantized on their way.",
        )
        _require(self.temperature > 0.0, "--rollout-temperature must be above 0: greedy rollouts have no gradient.")
        low, high = _TEMPERATURES
        _require(
            low <= self.temperature <= high,
            f"--rollout-temperature must lie between {low} and {high}, not {self.temperature}: vLLM samples at {low} "
            "where less is asked of it, and the trainer would temper otherwise.",
        )
        _require(
            all(self.stop or []),
            "--rollout-stop holds an empty string, which would end every response at once; drop it.",
        )
        _require(
            self.top_p == 1.0 and self.top_k == 0,
            "--rollout-top-p other than 1 and --rollout-top-k other than 0 are refused: the policy's log-probs would "
            "not be those of the distribution that was sampled from; leave them at 1.0 and 0.",
        )
        _require(
            0.0 < self.reward_timeout <= _WEEK,
            "--rollout-reward-timeout must be positive and at most 604800 seconds (a week).",
        )
        _require(self.eval_temperature >= 0.0, "--rollout-eval-temperature must not be negative; 0 is greedy.")
        _require(
            self.eval_temperature == 0.0 or low <= self.eval_temperature <= high,
            f"--rollout-eval-temperature must be 0 (greedy) or lie between {low} and {high}.",
        )
        _require(
            self.eval_samples == 1 or self.eval_temperature > 0.0,
            "--rollout-eval-samples above 1 needs --rollout-eval-temperature above 0: greedy responses are all equal.",
        )


@dataclass(kw_only=True)
class SyncConfig:
    """How weights reach the engine. Prefix --sync."""

    interval: int = 1
    """Publish weights every so many optimizer steps, before the next rollout phase (gives lag 0 .. interval - 1)."""

    verify: str = "first"
    """Which syncs are verified: off, first, or every-N (the first and every N-th after it). A verified sync overwrites
    the engine's old weights with NaN, compares a digest of every tensor, and then the engine's log-probs with the
    trainer's."""

    verify_tolerance: float | None = None
    """Largest allowed mean absolute log-prob difference of the check. Nats. Default: 1e-3 (fp32), 0.02 (fp16), 0.1
    (bf16)."""

    bucket_bytes: int = 64 << 20
    """Size of one staging bucket; peak extra memory is about two buckets. Bytes."""

    timeout: float = 600.0
    """Longest wait for any one tensor of a sync: for the ranks that bring it together, or the engine that takes it; and
    longest silence of an engine process that generates. Seconds; past it the run ends with a sentence that names it."""

    def verifies(self, syncs: int) -> bool:
        """Whether the sync after `syncs` others is a verified one."""
        if self.verify == "off":
            return False
        every = self.verify.partition("-")[2] if self.verify != "every" else "1"
        return syncs % int(every) == 0 if every else syncs == 0

    def validate(self) -> None:
        """Raise ConfigError on the first setting that cannot work."""
        _require_numbers(self, "sync", {"interval": 1, "bucket_bytes": 1 << 16}, {"bucket_bytes": _LARGEST_BUCKET})
        _require(
            re.fullmatch(r"off|first|every(-[1-9]\d{0,8})?", self.verify) is not None,
            f"--sync-verify must be off, first or every-N with a number N from 1 to 999999999, not {self.verify!r}.",
        )
        _require(1.0 <= self.timeout <= _WEEK, "--sync-timeout must lie between 1 and 604800 seconds (a week).")
        _require(
            self.verify_tolerance is None or self.verify_tolerance > 0.0,
            "--sync-verify-tolerance must be positive; --sync-verify off leaves the check out.",
        )


@dataclass(kw_only=True)
class PluginConfig:
    """The three groups together."""

    vcpo: VCPOConfig = dataclasses.field(default_factory=VCPOConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    sync: SyncConfig = dataclasses.field(default_factory=SyncConfig)

    def validate(self) -> None:
        """Check each group, then what only the groups together can show."""
        for group in (self.vcpo, self.rollout, self.sync):
            group.validate()
        responses, prompts = self.rollout.responses_per_prompt, self.rollout.prompts_per_step
        phase = responses * prompts * self.rollout.phase_steps(self.sync.interval)
        _require(
            phase <= _LARGEST_PHASE,
            f"--rollout-prompts-per-step x --rollout-responses-per-prompt x the steps of a rollout phase "
            f"(--rollout-steps-per-phase, by default --rollout-max-lag + 1) = {phase} trajectories, and at most "
            f"{_LARGEST_PHASE} are held at one time; lower one of the three.",
        )
        _require(
            responses > 1 or self.vcpo.reward_normalization != "group-std",
            "--rollout-responses-per-prompt 1 leaves --vcpo-reward-normalization group-std no rewards to compare "
            "(every gradient is zero); use minibatch-std, none, or more responses.",
        )
        _require(
            responses * prompts > 1 or (self.vcpo.baseline == "none" and self.vcpo.reward_normalization == "none"),
            "One trajectory a step leaves the baseline and the normalization nothing to compare with (every gradient "
            "is zero); raise --rollout-prompts-per-step or --rollout-responses-per-prompt.",
        )
        _require(
            responses > 1 or self.vcpo.baseline == "none" or self.vcpo.baseline_scope == "minibatch",
            "--rollout-responses-per-prompt 1 leaves a group baseline nothing to compare with (every gradient is "
            "zero); use --vcpo-baseline-scope minibatch, --vcpo-baseline none, or more responses.",
        )
