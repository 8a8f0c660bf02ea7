"""Megatron's torch_dist checkpoint -> Hugging Face: vcpo-convert-megatron-to-hf SOURCE TARGET [--help]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_vcpo.patches import megatron_cpu
from megatron_vcpo.runtime import logs

_EPILOG = """\
SOURCE is what training wrote, from any layout; optimizer state is left out. While it runs, everything is in
TARGET.partial; after an interruption the same command goes on there.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 1 after one sentence on stderr, 130 when interrupted."""
    logs.quiet_libraries(offline=True)
    megatron_cpu.install()
    from megatron_vcpo.checkpoint.convert import command

    parser = command.conversion_parser(
        "Convert a distributed checkpoint that training saved to Hugging Face, one output file in memory at a time.",
        "folder that was given to --save, or one iteration's folder in it",
        "folder to be made",
        _EPILOG,
    )
    parser.add_argument("--step", type=int, metavar="N", help="iteration to take (default: the latest)")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="copy this folder's tokenizer beside the model (default: the one that stands beside SOURCE)",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="true vocabulary, where the checkpoint knows only the padded one"
    )
    options = parser.parse_args(arguments)
    return command.run("convert_megatron_to_hf", command.megatron_to_hf, options)
