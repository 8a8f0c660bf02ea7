"""Why do trainer and engine disagree? vcpo-mismatch-report BATCH SAMPLER [--policy CHECKPOINT] [--engine]."""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_vcpo.patches import megatron_cpu
from megatron_vcpo.runtime import logs

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "float16", "bfloat16")
_EPILOG = """\
A run with --rollout-save-batch N writes BATCH to <run folder>/trajectories/. The difference between the trainer's
log-probs and the recorded ones is split by switching one thing at a time on the same tokens, in this order:

  sampling transform    trainer at temperature 1 against the rollouts' temperature. Both sides apply it, so it is not a
                        part of the difference: the row says what leaving it out would cost.
  staleness             weights of --policy against those of SAMPLER; not measured without --policy
  routing               the trainer's own experts against the batch's routes where it carries them
                        (--rollout-router-replay), else against those that the trainer chooses in fp32: then what the
                        engine's routers chose otherwise is in 'precision of engine'. None for a dense model.
  precision of trainer  the trainer's type against fp32, both with the reference's experts
  precision of engine   a fresh vLLM in the engine's type against the fp32 trainer: its rounding and its kernels
  cache                 what vLLM recorded while it decoded, against what it computes for the same tokens at once.
                        Both need --engine and a batch sampled at temperature 1; without, they are one row, 'rest'.

The trainer's model is computed on this machine's CPU: its types are the run's, its kernels are not.
docs/mismatch.md explains how to read the table.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Split the difference between training's and rollout's log-probs, and say which switch to turn.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("batch", metavar="BATCH", type=Path, help="trajectories/version_N.npz of a run")
    parser.add_argument(
        "sampler", metavar="SAMPLER", type=Path, help="checkpoint that sampled it, Hugging Face or Megatron"
    )
    parser.add_argument(
        "--sampler-step", type=int, metavar="N", help="iteration of SAMPLER, where it is a run's folder"
    )
    parser.add_argument("--policy", type=Path, metavar="CHECKPOINT", help="checkpoint that trained on it")
    parser.add_argument("--policy-step", type=int, metavar="N", help="iteration of --policy")
    parser.add_argument("--engine", action="store_true", help="score with vLLM too, once for each type")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="for --engine with a Megatron checkpoint that has no tokenizer beside it",
    )
    parser.add_argument("--trainer-dtype", choices=_DTYPES, help="default: the run's")
    parser.add_argument("--engine-dtype", choices=_DTYPES, help="default: the run's")
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=_DTYPES, help="types to compare (default: all)")
    parser.add_argument("--trajectories", type=int, default=64, metavar="N", help="take the first N (64)")
    parser.add_argument("-o", "--output", type=Path, help="picture (default: BATCH with the ending .png)")
    parser.add_argument("--quiet", action="store_true", help="only the report")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 1 after one sentence on stderr."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.trajectories < 1:
        parser.error("--trajectories must be at least 1.")
    logs.configure_command("mismatch_report")
    logs.quiet_libraries(offline=True)
    megatron_cpu.install()
    from megatron_vcpo.data.saved_batch import SavedBatchError
    from megatron_vcpo.engines.protocol import EngineError
    from megatron_vcpo.mcore.routers.replay import ReplayError
    from megatron_vcpo.models.errors import CheckpointError

    try:
        _run(options)
    except (SavedBatchError, CheckpointError, ReplayError, EngineError) as error:
        logger.error(str(error))
        return 1
    except OSError as error:
        logger.error(f"the picture could not be written: {error}.")
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    from megatron_vcpo.data.saved_batch import load_batch
    from megatron_vcpo.diagnostics.mismatch.measure import MismatchOptions, measure, usable
    from megatron_vcpo.diagnostics.mismatch.picture import draw
    from megatron_vcpo.diagnostics.mismatch.report import advice, table
    from megatron_vcpo.diagnostics.mismatch.scores import open_weights
    from megatron_vcpo.models.building.offline import single_process

    trajectories, origin = load_batch(options.batch)
    chosen = usable(trajectories, origin, options.trajectories)
    trainer, engine = options.trainer_dtype or origin.trainer_dtype, options.engine_dtype or origin.engine_dtype

    def say(what: str) -> None:
        if not options.quiet:
            logger.info(f"scoring: {what}")

    with single_process(), tempfile.TemporaryDirectory() as scratch:
        sampler = open_weights(options.sampler, step=options.sampler_step)
        policy = None if options.policy is None else open_weights(options.policy, step=options.policy_step)
        asked = MismatchOptions(
            trainer_dtype=trainer,
            engine_dtype=engine,
            dtypes=options.dtypes,
            engine=options.engine,
            scratch=Path(scratch) / "engine_model",
            tokenizer=options.tokenizer,
            progress=say,
        )
        result = measure(chosen, origin, sampler, policy, asked)
    sentence = advice(
        result,
        trainer_dtype=trainer,
        engine_dtype=engine,
        replayed=origin.router_replay != "off",
        quantized=origin.quantized,
    )
    print(f"{options.batch}: version {origin.version}, {len(chosen)} of {len(trajectories)} trajectories")
    print(f"trainer in {trainer}, engine in {engine}, temperature {origin.temperature:g}\n")
    print(f"{table(result)}\n\n{sentence}")
    picture = options.output or options.batch.with_suffix(".png")
    draw(result, sentence, picture)
    print(picture)
