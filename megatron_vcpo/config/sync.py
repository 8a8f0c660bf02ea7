"""How weights reach the engine. Prefix --sync."""

import re
from dataclasses import dataclass

from megatron_vcpo.config.checks import LARGEST_BUCKET, WEEK, require, require_numbers


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
        require_numbers(self, "sync", {"interval": 1, "bucket_bytes": 1 << 16}, {"bucket_bytes": LARGEST_BUCKET})
        require(
            re.fullmatch(r"off|first|every(-[1-9]\d{0,8})?", self.verify) is not None,
            f"--sync-verify must be off, first or every-N with a number N from 1 to 999999999, not {self.verify!r}.",
        )
        require(1.0 <= self.timeout <= WEEK, "--sync-timeout must lie between 1 and 604800 seconds (a week).")
        require(
            self.verify_tolerance is None or self.verify_tolerance > 0.0,
            "--sync-verify-tolerance must be positive; --sync-verify off leaves the check out.",
        )
