"""The groups of flags together."""

import dataclasses
from dataclasses import dataclass

from megatron_vcpo.config.checks import LARGEST_PHASE, require
from megatron_vcpo.config.objective import VCPOConfig
from megatron_vcpo.config.rollout import RolloutConfig
from megatron_vcpo.config.staleness import Staleness
from megatron_vcpo.config.sync import SyncConfig


@dataclass(kw_only=True)
class PluginConfig:
    """The three groups together."""

    vcpo: VCPOConfig = dataclasses.field(default_factory=VCPOConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    sync: SyncConfig = dataclasses.field(default_factory=SyncConfig)

    @property
    def staleness(self) -> Staleness:
        """How old the tokens of this run become, and how old they may be."""
        return self.rollout.staleness(self.sync.interval)

    def validate(self) -> None:
        """Check each group, then what only the groups together can show."""
        for group in (self.vcpo, self.rollout, self.sync):
            group.validate()
        responses, prompts = self.rollout.responses_per_prompt, self.rollout.prompts_per_step
        phase = responses * prompts * self.staleness.steps_per_phase
        require(
            phase <= LARGEST_PHASE,
            f"--rollout-prompts-per-step x --rollout-responses-per-prompt x the steps of a rollout phase "
            f"(--rollout-steps-per-phase, by default --rollout-max-lag + 1) = {phase} trajectories, and at most "
            f"{LARGEST_PHASE} are held at one time; lower one of the three.",
        )
        require(
            responses > 1 or self.vcpo.reward_normalization != "group-std",
            "--rollout-responses-per-prompt 1 leaves --vcpo-reward-normalization group-std no rewards to compare "
            "(every gradient is zero); use minibatch-std, none, or more responses.",
        )
        require(
            responses * prompts > 1 or (self.vcpo.baseline == "none" and self.vcpo.reward_normalization == "none"),
            "One trajectory a step leaves the baseline and the normalization nothing to compare with (every gradient "
            "is zero); raise --rollout-prompts-per-step or --rollout-responses-per-prompt.",
        )
        require(
            responses > 1 or self.vcpo.baseline == "none" or self.vcpo.baseline_scope == "minibatch",
            "--rollout-responses-per-prompt 1 leaves a group baseline nothing to compare with (every gradient is "
            "zero); use --vcpo-baseline-scope minibatch, --vcpo-baseline none, or more responses.",
        )
