"""python -m megatron_vcpo.supervised <the flags of megatron_vcpo.train>: a supervised warm-up on an environment's
answers.

The same seams, packing and checkpoint as reinforcement learning, with the environment's own answers in place of
rollouts: no engine is started. For models that do not yet know the format of an answer. The top level is light, as that
of megatron_vcpo.train.
"""

from __future__ import annotations

import argparse
import threading
from typing import TYPE_CHECKING

from megatron_vcpo.train import end_with_owner, run

if TYPE_CHECKING:
    from megatron_vcpo.config import PluginConfig
    from megatron_vcpo.flow.loop import Loop
    from megatron_vcpo.rollout.inputs import Inputs


def adjust(config: PluginConfig) -> None:
    """What differs from reinforcement learning in the plugin's settings."""
    config.vcpo.loss = "megatron_vcpo.flow.supervised:supervised_loss"
    config.vcpo.ess_scaling = "off"
    config.vcpo.baseline = "none"
    config.vcpo.energy = "logit"
    config.vcpo.reward_normalization = "none"
    config.vcpo.advantages = None
    config.vcpo.kl_coefficient = 0.0
    config.rollout.eval_interval = 0
    config.rollout.router_replay = "off"


def main() -> None:
    """Run Megatron's pretrain() on the environment's answers."""

    def answers(args: argparse.Namespace, config: PluginConfig, inputs: Inputs) -> Loop:
        from megatron_vcpo.flow.supervised import SupervisedLoop

        return SupervisedLoop(args, config, inputs)

    run(loop=answers, adjust=adjust)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    threading.Thread(target=end_with_owner, daemon=True).start()
