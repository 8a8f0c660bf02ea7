"""torchrun --nproc-per-node N -m megatron_vcpo.train <any Megatron flags> --vcpo-... --rollout-... --sync-...

Megatron's own pretrain() with the plugin in its seams. The top level is light on purpose: saving a checkpoint and the
reward pool spawn processes that import this file again.
"""

from __future__ import annotations

import sys
import warnings


def main() -> None:
    """Parse, check, and run Megatron's pretrain() with the plugin; a setting that cannot work exits with code 2."""
    from patches import megatron_cpu

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    megatron_cpu.install()
    megatron_cpu.patch_megatron()
    from megatron_vcpo.arguments import parse
    from megatron_vcpo.config import ConfigError

    try:
        args, config = parse()
    except ConfigError as error:
        sys.exit(_refusal(error))
    if config.vcpo.dry_run:
        from megatron_vcpo.dry_run import report

        print(report(args, config))
        return
    _train(args, config)


def _refusal(error: Exception) -> str:
    print(f"megatron_vcpo: {error}", file=sys.stderr)
    raise SystemExit(2)


def _train(args: object, config: object) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron_vcpo.plugin import MegatronPlugin
    from patches import megatron_cpu

    megatron_cpu.patch_training()
    plugin = MegatronPlugin(args, config)  # type: ignore[arg-type]
    plugin.install()
    model_config = gpt_config_from_args(args)
    plugin.configure_model(model_config)
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, model_config),
            plugin.data_provider,
            ModelType.encoder_or_decoder,
            plugin.forward_step,
        )
    finally:
        plugin.close()


if __name__ == "__main__":
    main()
