#!/usr/bin/env python3
"""Write docs/flags.md from the configuration's dataclasses: tools/write_flags.py [--check]."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Run by its path, a script sees only its own folder.
sys.path.insert(0, str(ROOT))

from megatron_vcpo.patches import megatron_cpu  # noqa: E402

megatron_cpu.install()

from megatron_vcpo import config  # noqa: E402
from megatron_vcpo.launch import flags  # noqa: E402

TARGET = ROOT / "docs" / "flags.md"
TOPICS: dict[str, tuple[str, ...]] = {
    "Loss and importance correction": (
        *("vcpo_correction", "vcpo_correction_lower", "vcpo_correction_upper", "vcpo_veto_ratio", "vcpo_aggregation"),
        *("vcpo_loss", "vcpo_overflow_retries"),
    ),
    "Learning rate by effective sample size": (
        *("vcpo_ess_scaling", "vcpo_ess_reference", "vcpo_ess_reference_steps", "vcpo_ess_floor", "vcpo_ess_weights"),
    ),
    "Baseline": (
        "vcpo_baseline",
        "vcpo_baseline_scope",
        "vcpo_energy",
        "vcpo_energy_method",
        "vcpo_advantages",
        "vcpo_reward_normalization",
    ),
    "Penalties": ("vcpo_kl_coefficient", "vcpo_kl_estimator", "vcpo_entropy_coefficient"),
    "Task": (
        *("rollout_environment", "rollout_environment_config", "rollout_prompts", "rollout_chat_template"),
        *("rollout_tokenizer", "rollout_reward_workers", "rollout_reward_timeout"),
    ),
    "Sampling": (
        *("rollout_prompts_per_step", "rollout_responses_per_prompt", "rollout_max_response_length"),
        *("rollout_max_prompt_length", "rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_stop"),
        *("rollout_stop_token_ids", "rollout_seed"),
    ),
    "Staleness": ("rollout_max_lag", "rollout_steps_per_phase", "sync_interval"),
    "Engine": (
        *("rollout_engine_dtype", "rollout_engine_tensor_parallel_size", "rollout_engine_kv_cache_bytes"),
        *("rollout_engine_max_sequences", "rollout_engine_placement", "rollout_engine_quantization"),
    ),
    "Weight sync": ("sync_verify", "sync_verify_tolerance", "sync_bucket_bytes", "sync_timeout"),
    "Mixture of experts": ("rollout_router_replay", "vcpo_freeze_router", "vcpo_freeze_expert_bias"),
    "Evaluation": (
        *("rollout_eval_interval", "rollout_eval_prompts", "rollout_eval_num_prompts", "rollout_eval_samples"),
        "rollout_eval_temperature",
    ),
    "Start, cost and checks": (
        *("vcpo_load_hf", "vcpo_verify_checkpoint", "vcpo_tokens_per_micro_batch", "vcpo_logit_chunk"),
        *("vcpo_dry_run", "vcpo_dry_run_processes", "vcpo_phase_deadline"),
    ),
    "Output": ("rollout_run_dir", "rollout_save_trajectories", "rollout_save_batch", "rollout_quiet", "vcpo_log_level"),
}
_HEAD = """# Flags

<!-- Written by tools/write_flags.py from megatron_vcpo/config/; do not edit. -->

Every flag of Megatron-LM's training works as it does there; these are the ones that the plugin adds. `--help` shows the
same texts. What each `--vcpo-correction` computes is in [corrections.md](corrections.md).
"""
_MEGATRON = """
## Defaults of Megatron's own flags that differ here

A flag given on the command line still wins; one that cannot work is refused with its name.

| flag's destination | default here |
|---|---|
"""


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;")


def _rows(parser: argparse.ArgumentParser) -> dict[str, str]:
    rows = {}
    for prefix, config_class in (
        ("vcpo", config.VCPOConfig),
        ("rollout", config.RolloutConfig),
        ("sync", config.SyncConfig),
    ):
        for field in dataclasses.fields(config_class):
            destination = f"{prefix}_{field.name}"
            action = next(a for a in parser._actions if a.dest == destination)
            text, _, default = " ".join(str(action.help).replace("%%", "%").split()).partition("Default: ")
            choices = "<br>" + ", ".join(map(str, action.choices)) if action.choices else ""
            cells = [_cell(text.strip()), _cell(default.rstrip(".") or str(action.default))]
            rows[destination] = f"| `{action.option_strings[0]}`{choices} | {cells[0]} | {cells[1]} |"
    return rows


def text() -> str:
    """The whole document."""
    parser = flags.add_vcpo_args(argparse.ArgumentParser())
    rows = _rows(parser)
    listed = [name for names in TOPICS.values() for name in names]
    if sorted(listed) != sorted(rows):
        different = sorted(set(listed) ^ set(rows)) or "one twice"
        raise SystemExit(f"write_flags: TOPICS and the dataclasses differ about {different}.")
    parts = [_HEAD]
    for topic, names in TOPICS.items():
        parts.append(f"\n## {topic}\n\n| flag | meaning | default |\n|---|---|---|\n")
        parts += [f"{rows[name]}\n" for name in names]
    parts.append(_MEGATRON)
    parts += [f"| `{name}` | {value} |\n" for name, value in flags.MEGATRON_DEFAULTS.items()]
    return "".join(parts)


def main(options: Sequence[str] | None = None) -> int:
    """Return 0, or 1 where --check finds the file out of date."""
    parser = argparse.ArgumentParser(description="Write docs/flags.md from the configuration's dataclasses.")
    parser.add_argument("--check", action="store_true", help="only compare, and exit with 1 where it differs")
    document = text()
    if parser.parse_args(options).check:
        if not TARGET.is_file() or TARGET.read_text() != document:
            print(f"write_flags: {TARGET.name} is out of date; run tools/write_flags.py.", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(document)
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
