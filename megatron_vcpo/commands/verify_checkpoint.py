"""Are two checkpoints the same model? vcpo-verify-checkpoint A B, each Hugging Face's or Megatron's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_vcpo.patches import megatron_cpu
from megatron_vcpo.runtime import logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 for the same model, 3 for another, 1 after one sentence on stderr."""
    logs.quiet_libraries(offline=True)
    megatron_cpu.install()
    from megatron_vcpo.checkpoint.convert import command

    parser = argparse.ArgumentParser(
        description="Compare two checkpoints, tensor by tensor and by the logits of a few prompts.",
        epilog="Exit code: 0 the same model (types may differ), 3 another one, 1 one of them cannot be read.",
    )
    parser.add_argument("a", metavar="A", type=Path, help="Hugging Face folder, or Megatron's")
    parser.add_argument("b", metavar="B", type=Path, help="the other one")
    parser.add_argument("--step-a", type=int, metavar="N", help="iteration of A, where it is a run's folder")
    parser.add_argument("--step-b", type=int, metavar="N", help="iteration of B, where it is a run's folder")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="true vocabulary, for checkpoints without it")
    parser.add_argument("--no-logits", action="store_true", help="only tensors; needs no memory for a model")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    return command.run("verify_checkpoint", command.verify_two, options)
