"""A process of its own for a conversion that is killed, or whose memory is measured.

convert_worker.py kill SOURCE TARGET BYTES      ends itself with SIGKILL when BYTES are written
convert_worker.py memory SOURCE MEGATRON BACK   prints the bytes above the start at the peak of both directions
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vcpo.patches import megatron_cpu

megatron_cpu.install()

from megatron_vcpo.checkpoint.convert.source import MegatronSource  # noqa: E402
from megatron_vcpo.checkpoint.convert.to_hf import convert_to_hf  # noqa: E402
from megatron_vcpo.checkpoint.convert.to_megatron import ConversionOptions, convert_to_megatron  # noqa: E402
from megatron_vcpo.models.building.offline import single_process  # noqa: E402


def kill(source: str, target: str, limit: str) -> None:
    written = 0

    def count(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if written >= int(limit):
            os.kill(os.getpid(), signal.SIGKILL)

    with single_process():
        convert_to_megatron(source, target, ConversionOptions(shard_bytes=20_000), count)


def resident(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


def start() -> int:
    """Bytes resident now; the kernel's high-water mark is set back to it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def memory(source: str, made: str, back: str) -> None:
    options = ConversionOptions(shard_bytes=16 << 20)
    peaks = {}
    with single_process():
        for module in ("megatron.core.dist_checkpointing", "megatron.training.models.gpt", "transformers"):
            importlib.import_module(module)  # their memory is not the conversion's
        before = start()
        convert_to_megatron(source, made, options).folder.commit()
        peaks["to_megatron"] = resident("VmHWM") - before
        start()  # what the first one left behind counts
        convert_to_hf(MegatronSource(made), back, options).folder.commit()
        peaks["to_hf"] = resident("VmHWM") - before
    print(json.dumps(peaks))


if __name__ == "__main__":
    {"kill": kill, "memory": memory}[sys.argv[1]](*sys.argv[2:])
