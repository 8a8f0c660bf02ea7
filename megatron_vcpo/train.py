"""torchrun --nproc-per-node N -m megatron_vcpo.train <any Megatron flags> --vcpo-... --rollout-... --sync-...

Megatron's own pretrain() with the plugin in its seams; without torchrun, a job of one process. The top level is light
on purpose: saving a checkpoint spawns processes that import this file again.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron_vcpo.runtime import logs

if TYPE_CHECKING:
    from megatron_vcpo.config import PluginConfig
    from megatron_vcpo.flow.loop import Loop
    from megatron_vcpo.plugin import LoopFactory, MegatronPlugin
    from megatron_vcpo.rollout.inputs import Inputs

logger = logging.getLogger("megatron_vcpo.train")  # the module's name is __main__


def main() -> None:
    """Reinforcement learning: Megatron's pretrain() with rollouts."""

    def rollouts(args: argparse.Namespace, config: PluginConfig, inputs: Inputs) -> Loop:
        from megatron_vcpo.flow.colocated import ColocatedLoop

        return ColocatedLoop(args, config, inputs)

    run(loop=rollouts)


def run(*, loop: LoopFactory, adjust: Callable[[PluginConfig], None] | None = None) -> None:
    """Parse, check, and run Megatron's pretrain() with the plugin; a setting that cannot work exits with code 2.

    Args:
        loop: makes the loop over optimizer steps.
        adjust: changes the parsed settings before they are checked.
    """
    with _ended_at_once_by_interrupts():
        args, config, inputs = _prepare(adjust)
    if config.vcpo.dry_run:
        from megatron_vcpo.launch.dry_run import report

        if args.rank == 0:
            print(report(args, config, inputs.tokenizer))
        return
    _pretrain(args, config, inputs, loop)


@contextlib.contextmanager
def _ended_at_once_by_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process with one sentence and code 130, as long as there is nothing to lose.

    An exception could come up within any library's import, and some swallow what they do not know.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, b"megatron_vcpo: interrupted before the start; nothing was begun.\n")
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a shell's background job, say
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _prepare(adjust: Callable[[PluginConfig], None] | None) -> tuple[argparse.Namespace, PluginConfig, Inputs]:
    """The flags, checked, and what the checks opened; exits with code 2 after one sentence."""
    from megatron_vcpo.patches import megatron_cpu

    logs.quiet_libraries()
    _be_one_process_without_torchrun()
    logs.configure(rank=int(os.environ["RANK"]))
    megatron_cpu.install()
    megatron_cpu.patch_megatron()
    from megatron_vcpo.config import ConfigError
    from megatron_vcpo.launch import preflight
    from megatron_vcpo.launch.flags import finish, make_global, parse
    from megatron_vcpo.launch.folder_lock import FolderClaim
    from megatron_vcpo.runtime.private_folder import use_private_folder

    try:
        args, config = parse(adjust)
        logs.configure(rank=args.rank, level=config.vcpo.log_level)
        inputs = preflight.check(args, config)
        finish(args, config, inputs.vocab_size)
        preflight.check_model(args, config, inputs.vocab_size)
        if not config.vcpo.dry_run:
            use_private_folder()
            atexit.register(FolderClaim(args, config).close)  # runs after threads that still remove old checkpoints
    except ConfigError as error:
        if os.environ["LOCAL_RANK"] == "0":  # once for each machine, which may lack a file of its own
            logger.error(str(error))
        sys.exit(2)
    if not config.vcpo.dry_run:
        make_global(args, config)
    return args, config, inputs


def _be_one_process_without_torchrun() -> None:
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _pretrain(args: argparse.Namespace, config: PluginConfig, inputs: Inputs, loop: LoopFactory) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_vcpo.launch.failures import failure_sentence
    from megatron_vcpo.runtime.watchdog import EXIT_CODE, peer_is_gone

    with _ended_at_once_by_interrupts():
        plugin, model_config = _plugin(args, config, inputs, loop)
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, model_config),
            plugin.data_provider,
            ModelType.encoder_or_decoder,
            plugin.forward_step,
        )
        if plugin.loop is None and args.iteration >= args.train_iters and args.rank == 0:
            logger.error(
                f"nothing is left to train: the checkpoint in --load {args.load} is of iteration {args.iteration}, and "
                f"--train-iters is {args.train_iters}; raise it to go on."
            )
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt):
            logger.error(
                "interrupted; go on from the last checkpoint with --load. With --exit-signal-handler --exit-signal "
                "SIGINT a run saves itself first."
            )
            sys.exit(130)
        sentence = None if isinstance(error, SystemExit) else failure_sentence(error, args, config.rollout.run_dir)
        if sentence is None:
            where = None if isinstance(error, SystemExit) else plugin.explain(error)
            if where is not None:
                reason = str(error).partition("\n")[0]
                logger.error(f"{where} ({type(error).__name__}: {reason})")
                if peer_is_gone(error):
                    sys.exit(EXIT_CODE)
            raise
        logger.error(sentence)
        sys.exit(1)
    finally:
        plugin.close()


def _plugin(
    args: argparse.Namespace, config: PluginConfig, inputs: Inputs, loop: LoopFactory
) -> tuple[MegatronPlugin, Any]:
    """The plugin in Megatron's seams, and the model's configuration."""
    from megatron_vcpo.models.building.gpt_config import gpt_config
    from megatron_vcpo.patches import megatron_cpu
    from megatron_vcpo.plugin import MegatronPlugin
    from megatron_vcpo.runtime.watchdog import end_with_torchrun

    end_with_torchrun(args.rank)
    megatron_cpu.patch_training()
    plugin = MegatronPlugin(args, config, inputs, loop)
    plugin.install()
    model_config = gpt_config(args)
    plugin.configure_model(model_config)
    return plugin, model_config


def end_with_owner() -> None:
    """Watch, in a process that this program spawned, whether its owner is still there, and end with it.

    Megatron keeps a manager process after its first save, which would outlive a trainer that was killed.
    """
    owner = os.getppid()
    while os.getppid() == owner:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    threading.Thread(target=end_with_owner, daemon=True).start()
