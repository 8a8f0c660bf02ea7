"""Megatron imports nvidia-modelopt if it is installed, and modelopt imports vLLM. That costs seconds, prints log lines
to stdout, and loads an engine library before the trainer has set up its devices and processes.

Versions: megatron-core 0.19.2 (training/checkpointing.py), nvidia-modelopt 0.47.0 (torch/quantization/plugins). Its
plugin for vLLM quantizes a model inside the engine, which is not needed here. No longer needed when
`tests/patches/test_modelopt_without_vllm.py::test_modelopt_alone_still_imports_vllm` fails.

Only megatron.training imports modelopt by itself, megatron.core does not. So a room whose modules import
megatron.training or modelopt applies this in its `__init__`, which runs before any of them.
"""

from __future__ import annotations

import sys
import types

_PLUGIN = "modelopt.torch.quantization.plugins.vllm"


def apply() -> None:
    """Put an empty module in the plugin's place. Call it before modelopt is imported; later it has no effect."""
    sys.modules.setdefault(_PLUGIN, types.ModuleType(_PLUGIN))
