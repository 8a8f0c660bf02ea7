"""A supervised warm-up in one process: vcpo-supervised FLAGS. For more: torchrun -m megatron_vcpo.supervised FLAGS."""

from __future__ import annotations

import runpy


def main() -> None:
    """As `python -m megatron_vcpo.supervised`, for the reason in `commands.train`."""
    runpy.run_module("megatron_vcpo.supervised", run_name="__main__", alter_sys=True)
