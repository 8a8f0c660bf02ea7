"""Quantize a checkpoint for the rollout engine: vcpo-quantize-for-rollout SOURCE TARGET --format fp8 [--help]."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from megatron_vcpo.checkpoint.quantize.calibrate import CONFIGURATIONS, QuantizeOptions, quantize, require_optimizer
from megatron_vcpo.environments import EnvironmentSetupError, draw_prompt, make_environment
from megatron_vcpo.environments.questions import strict_json
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.runtime import logs

logger = logging.getLogger(__name__)

_LARGEST = 1 << 20  # prompts, or tokens of one: far beyond any calibration, within any memory
_DRAWS = 10  # prompts looked at for each that is needed, where some come again
_EPILOG = """\
The original model answers each prompt; the first --calibration of these sequences set the scales of activations, and on
the next --measured the log-probs of original and quantized model are compared. TARGET holds the weights, the tokenizer
and quantization_report.json. Training samples with it under --rollout-engine-quantization TARGET, which quantizes every
new set of weights in the same way.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Quantize a checkpoint with NVIDIA's Model Optimizer, calibrated on the prompts of a task.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="Hugging Face folder with its tokenizer")
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder to be made")
    parser.add_argument("--format", choices=CONFIGURATIONS, required=True, help="nvfp4 needs a GPU")
    parser.add_argument("--environment", default="jsonl", help="task, as --rollout-environment (jsonl)")
    parser.add_argument("--environment-config", default="{}", metavar="JSON", help="as --rollout-environment-config")
    parser.add_argument("--prompts", metavar="FILE", help="prompt file of jsonl, as --rollout-prompts")
    parser.add_argument("--chat-template", action="store_true", help="as --rollout-chat-template")
    parser.add_argument("--calibration", type=int, default=128, metavar="N", help="prompts to calibrate on (128)")
    parser.add_argument("--measured", type=int, default=32, metavar="N", help="prompts to measure on (32)")
    parser.add_argument("--response-tokens", type=int, default=128, metavar="N", help="of each response (128)")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, metavar="N", help="cut from the front (1024)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling (0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 2 after one sentence on stderr, 130 when interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("calibration", "measured", "response_tokens", "max_prompt_tokens"):
        if not 1 <= getattr(options, name) <= _LARGEST:
            parser.error(f"--{name.replace('_', '-')} must lie between 1 and {_LARGEST}.")
    logs.configure_command("quantize_for_rollout")
    try:
        require_optimizer(options.format)
        result = quantize(
            options.source,
            options.target,
            _prompts(options),
            QuantizeOptions(
                format=options.format,
                calibration=options.calibration,
                measured=options.measured,
                response_tokens=options.response_tokens,
                max_prompt_tokens=options.max_prompt_tokens,
                chat=options.chat_template,
                seed=options.seed,
                progress=lambda what: logger.info(f"{what} ..."),
            ),
        )
    except (CheckpointError, EnvironmentSetupError) as error:
        logger.error(str(error))
        return 2
    except KeyboardInterrupt:
        logger.error(f"interrupted; nothing is left of {options.target}.")
        return 130
    print("\n".join(result.lines()))
    print(options.target)
    return 0


def _prompts(options: argparse.Namespace) -> list[str]:
    if options.environment == "jsonl" and options.prompts is None:
        raise EnvironmentSetupError("--environment jsonl needs --prompts FILE.")
    try:
        config = strict_json(options.environment_config)
    except ValueError as error:
        raise EnvironmentSetupError(f"--environment-config is not JSON ({error}).") from error
    if not isinstance(config, dict):
        raise EnvironmentSetupError(f"--environment-config must be a JSON object, not {options.environment_config!r}.")
    environment = make_environment(
        options.environment, split="train", seed=options.seed, config=config, prompts_file=options.prompts
    )
    # Different ones: a file that is read round and round would be measured on what it calibrates.
    needed = options.calibration + options.measured
    found: dict[str, None] = {}
    for index in range(_DRAWS * needed):
        found[draw_prompt(environment, index).text] = None
        if len(found) == needed:
            break
    return list(found)
