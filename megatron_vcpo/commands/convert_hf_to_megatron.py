"""Hugging Face checkpoint -> Megatron's torch_dist format: vcpo-convert-hf-to-megatron SOURCE TARGET [--help]."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_vcpo.patches import megatron_cpu
from megatron_vcpo.runtime import logs

_EPILOG = """\
TARGET then loads with --load TARGET on any layout, at iteration 0 and without optimizer state. Megatron's flags for
the model are printed and stand in TARGET/megatron_flags.sh as bash arrays:

    source TARGET/megatron_flags.sh
    torchrun ... "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${LOAD_ARGS[@]}" ...

While it runs, everything is in TARGET.partial; after an interruption the same command goes on there.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 1 after one sentence on stderr, 130 when interrupted."""
    logs.quiet_libraries(offline=True)
    megatron_cpu.install()
    from megatron_vcpo.checkpoint.convert import command

    parser = command.conversion_parser(
        "Convert a Hugging Face checkpoint to Megatron's torch_dist format, one tensor in memory at a time.",
        "folder with config.json and safetensors files",
        "folder to be made, for --load",
        _EPILOG,
    )
    options = parser.parse_args(arguments)
    return command.run("convert_hf_to_megatron", command.hf_to_megatron, options)
