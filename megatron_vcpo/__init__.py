"""Reinforcement learning of language models on stale rollouts, as a plugin for Megatron-Core.

`register` is for a training loop of your own; `python -m megatron_vcpo.train` is Megatron's loop with the plugin in it.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "register"]


def __getattr__(name: str) -> Any:
    # Lazy: reward processes and the dry run import the package without wanting Megatron in memory.
    if name == "register":
        from megatron_vcpo.registration import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
