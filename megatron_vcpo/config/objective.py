"""The objective: loss, importance correction, effective sample size, baseline. Prefix --vcpo."""

from dataclasses import dataclass
from typing import Literal

from megatron_vcpo.config.checks import LARGEST_FLOAT, LARGEST_LIST, WEEK, require, require_numbers

CorrectionName = Literal[
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


@dataclass(kw_only=True)
class VCPOConfig:
    """What is optimized: importance correction, ESS scaling, baseline, energies, aggregation, penalties. Prefix
    --vcpo."""

    loss: str = "megatron_vcpo.objective:vcpo_loss"
    """Import path 'module:function' of the loss; any function LossInputs -> LossOutputs."""

    correction: CorrectionName = "sequence-tis"
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

    advantages: str | None = None
    """Import path 'module:function' of advantages of your own, AdvantageInputs -> [N], in place of (reward - baseline)
    and its normalization, which are then to be none (docs/extending.md). Default: none."""

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

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is written to stderr. error: only why the run ends. warning: also rejected rewards, refused trajectories,
    and steps that were skipped or made again. info: also notes on flags, folders and checkpoints. debug: also, from
    every rank and with the time, each phase it enters, each publication and each rollout phase. Megatron's own messages
    follow --logging-level."""

    dry_run: bool = False
    """Check every flag, print the resolved configuration, rank map and memory estimate, start nothing, exit 0."""

    dry_run_processes: int | None = None
    """Processes that the dry run checks for. Default: those of this launch."""

    def validate(self) -> None:
        """Raise ConfigError on the first setting that cannot work."""
        require_numbers(
            self,
            "vcpo",
            {
                "ess_reference_steps": 1,
                "tokens_per_micro_batch": 1,
                "logit_chunk": 0,
                "overflow_retries": 0,
                "dry_run_processes": 1,
            },
            {"dry_run_processes": LARGEST_LIST},
        )
        if self.ess_reference != "auto":
            try:
                reference = float(self.ess_reference)
            except ValueError:
                reference = -1.0
            require(
                0.0 < reference <= 1.0,
                f"--vcpo-ess-reference must be a number in (0, 1] or 'auto', not {self.ess_reference!r}.",
            )
        require(
            self.advantages is None or (self.baseline, self.reward_normalization) == ("none", "none"),
            "--vcpo-advantages takes the place of baseline and normalization: add --vcpo-baseline none and "
            "--vcpo-reward-normalization none, or drop it.",
        )
        require(0.0 <= self.ess_floor <= 1.0, f"--vcpo-ess-floor must lie in [0, 1], not {self.ess_floor}.")
        require(
            self.phase_deadline is None or self.phase_deadline == 0.0 or 1.0 <= self.phase_deadline <= WEEK,
            "--vcpo-phase-deadline must lie between 1 and 604800 seconds (a week); 0 is off.",
        )
        require(
            0.0 <= self.veto_ratio < 1.0,
            f"--vcpo-veto-ratio must lie in [0, 1), not {self.veto_ratio}: fresh samples have the ratio 1.",
        )
        require(self.kl_coefficient >= 0.0, "--vcpo-kl-coefficient must not be negative.")
        if self.energy == "exact":
            self._validate_exact()
        require(
            self.ess_weights == "raw" or self.correction != "none" or self.correction_upper is not None,
            "--vcpo-ess-weights capped with --vcpo-correction none needs --vcpo-correction-upper.",
        )
        for name, value in (("lower", self.correction_lower), ("upper", self.correction_upper)):
            require(value is None or value >= 0.0, f"--vcpo-correction-{name} must not be negative.")
        if self.correction in MASK_BOUNDS:
            low, high = MASK_BOUNDS[self.correction]
            low = low if self.correction_lower is None else self.correction_lower
            high = high if self.correction_upper is None else self.correction_upper
            require(
                low < high,
                f"--vcpo-correction-lower ({low}) must be below --vcpo-correction-upper ({high}): nothing would be "
                "trained on.",
            )
            require(
                low <= 1.0 <= high,
                f"--vcpo-correction-lower {low} and --vcpo-correction-upper {high} leave out the ratio 1 "
                f"({self.correction}): no fresh sample would be trained on.",
            )
        require(
            self.correction not in ("token-tis", "sequence-tis") or self.correction_upper != 0.0,
            f"--vcpo-correction-upper 0 makes every weight of {self.correction} zero; give a bound above 0.",
        )
        for name in ("kl_coefficient", "entropy_coefficient", "correction_lower", "correction_upper"):
            value, flag = getattr(self, name) or 0.0, f"--vcpo-{name.replace('_', '-')}"
            require(abs(value) <= LARGEST_FLOAT, f"{flag} must be at most {LARGEST_FLOAT:g} in size, not {value:g}.")

    def _validate_exact(self) -> None:
        require(
            self.baseline.startswith("opob"),
            f"--vcpo-energy exact weights an optimal baseline, and --vcpo-baseline is {self.baseline}: use opob or "
            "opob-leave-one-out, or drop --vcpo-energy.",
        )
        if self.energy_method == "two-pass":
            return
        method = f"--vcpo-energy-method {self.energy_method}"
        require(
            self.correction not in ("gspo", "ppo-clip"),
            f"{method} cannot work with --vcpo-correction {self.correction}, whose gradient is not linear in the "
            "advantage; use --vcpo-energy-method two-pass.",
        )
        require(
            self.loss == type(self).loss,
            f"{method} forms the gradient of the built-in loss; with --vcpo-loss use --vcpo-energy-method two-pass.",
        )
        require(
            self.energy_method != "accumulators" or (self.baseline, self.baseline_scope) == ("opob", "minibatch"),
            f"{method} needs one baseline for all: --vcpo-baseline opob with --vcpo-baseline-scope minibatch; or use "
            "--vcpo-energy-method deferred.",
        )
