"""Configuration: the fields of these dataclasses ARE the command-line flags.

`launch/flags.py` turns every field into `--<prefix>-<field-name>`; the docstring under a field is its help text and
states meaning, unit and bounds. Each class checks itself in `validate()`, which raises `ConfigError` with one
sentence that names the flag to change.
"""

from megatron_vcpo.config.checks import ConfigError
from megatron_vcpo.config.objective import MASK_BOUNDS, Aggregation, CorrectionName, VCPOConfig
from megatron_vcpo.config.plugin import PluginConfig
from megatron_vcpo.config.rollout import RolloutConfig
from megatron_vcpo.config.staleness import Staleness
from megatron_vcpo.config.sync import SyncConfig

__all__ = [
    "MASK_BOUNDS",
    "Aggregation",
    "ConfigError",
    "CorrectionName",
    "PluginConfig",
    "RolloutConfig",
    "Staleness",
    "SyncConfig",
    "VCPOConfig",
]
