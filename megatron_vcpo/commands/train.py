"""Reinforcement learning in one process: vcpo-train FLAGS. For more: torchrun -m megatron_vcpo.train FLAGS."""

from __future__ import annotations

import runpy


def main() -> None:
    """As `python -m megatron_vcpo.train`.

    A process that Megatron spawns imports the main module again. That has to be megatron_vcpo.train, which watches
    there over the process's end, and not the console script.
    """
    runpy.run_module("megatron_vcpo.train", run_name="__main__", alter_sys=True)
