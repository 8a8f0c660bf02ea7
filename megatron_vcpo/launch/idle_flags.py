"""Flags that do nothing beside the others given: said at the start, because whoever gives one expects something of it.

They are no mistakes to refuse: a flag at the end of a launch script may have switched off what they belong to.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from megatron_vcpo.config import PluginConfig

_WITHOUT_LOWER_BOUND = ("none", "token-tis", "sequence-tis")


def idle_flags(args: argparse.Namespace, config: PluginConfig) -> list[str]:
    """A sentence for each flag that has another value than its default, and no effect."""
    vcpo, rollout, sync = config.vcpo, config.rollout, config.sync
    optimal, scaled = vcpo.baseline.startswith("opob"), vcpo.ess_scaling != "off"
    evaluation = ("eval_prompts", "eval_num_prompts", "eval_samples", "eval_temperature")
    rules: tuple[tuple[str, Any, tuple[str, ...], bool, str], ...] = (
        ("rollout", rollout, evaluation, rollout.eval_interval > 0, "--rollout-eval-interval above 0"),
        ("vcpo", vcpo, ("energy",), optimal, "--vcpo-baseline opob or opob-leave-one-out"),
        ("vcpo", vcpo, ("energy_method",), vcpo.energy == "exact", "--vcpo-energy exact"),
        ("vcpo", vcpo, ("baseline_scope",), vcpo.baseline != "none", "a --vcpo-baseline"),
        ("vcpo", vcpo, ("ess_reference", "ess_floor", "ess_weights"), scaled, "--vcpo-ess-scaling sqrt or linear"),
        ("vcpo", vcpo, ("ess_reference_steps",), vcpo.ess_reference == "auto", "--vcpo-ess-reference auto"),
        ("vcpo", vcpo, ("kl_estimator",), vcpo.kl_coefficient > 0.0, "--vcpo-kl-coefficient above 0"),
        (
            "vcpo",
            vcpo,
            ("correction_lower",),
            vcpo.correction not in _WITHOUT_LOWER_BOUND,
            f"a --vcpo-correction with a lower bound, which {vcpo.correction} has not",
        ),
        ("sync", sync, ("verify_tolerance",), sync.verify != "off", "--sync-verify first or every-N"),
    )
    found = []
    for prefix, group, names, effective, needed in rules:
        defaults = {field.name: field.default for field in fields(group)}
        for name in names:
            if not effective and getattr(group, name) != defaults[name]:
                found.append(f"--{prefix}-{name.replace('_', '-')} does nothing without {needed}.")
    if args.save_interval is not None and args.save is None:
        found.append("--save-interval does nothing without --save: no checkpoint will be written.")
    return found
