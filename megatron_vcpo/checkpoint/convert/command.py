"""What the commands of the converters and the verifier share: flags, progress, verification and exit codes."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from megatron_vcpo.checkpoint.convert.compare import compare, compare_logits, description_differences, narrower
from megatron_vcpo.checkpoint.convert.compare_files import file_differences
from megatron_vcpo.checkpoint.convert.flags import DTYPES, TargetLayout
from megatron_vcpo.checkpoint.convert.source import CheckpointSource, HuggingFaceSource, MegatronSource, open_source
from megatron_vcpo.checkpoint.convert.to_hf import convert_to_hf
from megatron_vcpo.checkpoint.convert.to_megatron import (
    ConversionOptions,
    Result,
    convert_to_megatron,
    hf_bytes,
    stored_dtype,
)
from megatron_vcpo.models.building.offline import single_process
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.runtime import logs

logger = logging.getLogger(__name__)

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size(text: str) -> int:
    """Bytes from '5GB', '500MB' or a number; raises argparse's error otherwise."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?B?)", text.strip().upper())
    unit = None if match is None else (match[2] if match[2].endswith("B") or not match[2] else match[2] + "B")
    if match is None or unit not in _UNITS or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return int(match[1]) * _UNITS[unit]


def add_conversion_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of both converters."""
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: what they are stored in)")
    parser.add_argument(
        "--shard-size", type=size, default=size("5GB"), metavar="SIZE", help="a file is closed at this size (5GB)"
    )
    for name, word in (
        ("tensor", "tensor"),
        ("pipeline", "pipeline"),
        ("expert", "expert"),
        ("expert-tensor", "expert tensor"),
    ):
        parser.add_argument(
            f"--target-{name}-parallel-size",
            type=int,
            default=None if name == "expert-tensor" else 1,
            metavar="N",
            help=f"check that the model divides over N {word}-parallel ranks, and print the flags for it"
            + (" (default: the tensor-parallel size)" if name == "expert-tensor" else ""),
        )
    parser.add_argument(
        "--verify",
        nargs="?",
        const="full",
        choices=("full", "ledger"),
        help="read the result back and compare: every tensor (ledger), and the logits of a few prompts too (full, "
        "which needs memory for the model in fp32)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier conversion, once the new one is complete"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def options_of(arguments: argparse.Namespace) -> ConversionOptions:
    """The options that the flags of both converters give."""
    return ConversionOptions(
        dtype=DTYPES.get(arguments.dtype or ""),
        shard_bytes=arguments.shard_size,
        overwrite=arguments.overwrite,
        layout=TargetLayout(
            tensor=arguments.target_tensor_parallel_size,
            pipeline=arguments.target_pipeline_parallel_size,
            expert=arguments.target_expert_parallel_size,
            expert_tensor=arguments.target_expert_tensor_parallel_size,
        ),
    )


def hf_to_megatron(arguments: argparse.Namespace) -> int:
    """Convert, verify, give the folder its name, print the flags."""
    options = options_of(arguments)
    with single_process():
        source = HuggingFaceSource(arguments.source)
        with _bar(_total(source, options.dtype), "converting", arguments.quiet) as bar:
            result = convert_to_megatron(arguments.source, arguments.target, options, bar.update)
        if arguments.verify:
            verify(source, MegatronSource(result.checkpoint), result, arguments.verify, options, arguments.quiet)
        return _publish(result)


def megatron_to_hf(arguments: argparse.Namespace) -> int:
    """Convert, verify, give the folder its name, print the flags."""
    options = options_of(arguments)
    with single_process():
        source = MegatronSource(arguments.source, step=arguments.step, vocab_size=arguments.vocab_size)
        with _bar(_total(source, options.dtype), "converting", arguments.quiet) as bar:
            result = convert_to_hf(
                source, arguments.target, options, tokenizer=arguments.tokenizer, progress=bar.update
            )
        if arguments.verify:
            verify(source, HuggingFaceSource(result.checkpoint), result, arguments.verify, options, arguments.quiet)
        if result.files is None:
            logger.info(
                f"# {_unknown(source)}: {result.folder.target} names no end token and holds no tokenizer; --tokenizer "
                "DIR takes both from the model's own folder"
            )
        return _publish(result)


def verify(
    source: CheckpointSource, made: CheckpointSource, result: Result, how: str, options: ConversionOptions, quiet: bool
) -> None:
    """Compare the output with its source; CheckpointError if they differ.

    Reports on stderr, because stdout holds only the flags, which a script may read.
    """
    with _bar(_total(source, None), "verifying", quiet) as bar:
        ledger = compare(source, made, bar.update)
    for line in ledger.lines():
        logger.info(line)
    files = [] if result.files is None or made.files is None else file_differences(result.files, made.files)
    for line in files:
        logger.info(line)
    problem = "the files beside the weights differ" if files else None
    problem = problem if ledger.same else "tensors differ"
    if any(made.dtype(spec) != stored_dtype(source, spec, options.dtype) for spec in source.specs):
        problem = "tensors are of another type"
    if how == "full" and problem is None:
        gap = compare_logits(source, made, dtype=options.dtype)
        logger.info(gap.line())
        problem = None if gap.same else "the logits differ"
    if problem is not None:
        result.folder.close()
        raise CheckpointError(
            f"The conversion of {source.path} is wrong ({problem}); it stays in {result.folder.path}."
        )


def verify_two(arguments: argparse.Namespace) -> int:
    """Compare two checkpoints of either kind; exit code 0 if they are the same model, 3 if not."""
    with single_process():
        a = open_source(arguments.a, step=arguments.step_a, vocab_size=arguments.vocab_size)
        b = open_source(arguments.b, step=arguments.step_b, vocab_size=arguments.vocab_size)
        settings = description_differences(a.description, b.description)
        for line in settings:
            print(line)
        settings += _compare_files(a, b)
        with _bar(_total(a, None), "comparing", arguments.quiet) as bar:
            ledger = compare(a, b, bar.update)
        for line in ledger.lines():
            print(line)
        same = ledger.same and not settings
        if not arguments.no_logits and a.description.vocab_size == b.description.vocab_size:
            gap = compare_logits(a, b, dtype=narrower(a, b) if ledger.rounded else None)
            print(gap.line())
            same = same and gap.same
    print("the same model" if same else "not the same model")
    return 0 if same else 3


def _compare_files(a: CheckpointSource, b: CheckpointSource) -> list[str]:
    """Print the differences besides the weights, or which side's files are unknown; return the differences."""
    if a.files is not None and b.files is not None:
        lines = file_differences(a.files, b.files)
    else:
        lines = []
        print(f"not compared beside the weights: {_unknown(a if a.files is None else b)}")
    for line in lines:
        print(line)
    return lines


def _unknown(source: CheckpointSource) -> str:
    return f"nothing beside {source.path} says where a response of the model ends"


def _publish(result: Result) -> int:
    result.folder.commit()
    print(result.flags, end="")
    logger.info(f"# written to {result.folder.target}")
    return 0


def _total(source: CheckpointSource, dtype: torch.dtype | None) -> int:
    return sum(hf_bytes(spec, stored_dtype(source, spec, dtype)) for spec in source.specs)


def _bar(total: int, what: str, quiet: bool) -> tqdm[NoReturn]:
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=quiet, mininterval=0.5)


def run(name: str, command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command and return its exit code; errors that explain themselves become one sentence on stderr."""
    logs.configure_command(name)
    transformers_logging.disable_progress_bar()
    try:
        return command(arguments)
    except CheckpointError as error:
        logger.error(str(error))
        return 1
    except KeyboardInterrupt:
        logger.error("interrupted; the same command goes on where it was.")
        return 130


def conversion_parser(description: str, source: str, target: str, epilog: str) -> argparse.ArgumentParser:
    """A parser with SOURCE, TARGET and the flags of both converters."""
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help=source)
    parser.add_argument("target", metavar="TARGET", type=Path, help=target)
    add_conversion_flags(parser)
    return parser
