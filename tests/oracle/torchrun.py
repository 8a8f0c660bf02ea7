"""Launch a worker as torchrun does and show a developer the trace of the rank that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.forked import forked_python
from tests.oracle.worker import PASSED

_ROOT = Path(__file__).parents[2]
_SHOWN = 6000  # characters


def torchrun(
    worker: Path, *arguments: str, processes: int, passed: str = PASSED, timeout: float = 900.0, forked: bool = True
) -> str:
    """Run the worker on gloo and return its output; the test fails unless the output holds the line `passed`.

    forked: its processes are forks of one that has imported Megatron, and not new ones under torchrun itself.
    """
    launcher = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    done = subprocess.run(
        [*(forked_python() if forked else [sys.executable]), *launcher, str(worker), *arguments],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode or passed not in done.stdout:
        traces = "\n".join(line for line in done.stderr.splitlines() if line.startswith("[rank"))
        pytest.fail(f"{done.stdout[-2000:]}\n{traces[-_SHOWN:] or done.stderr[-_SHOWN:]}", pytrace=False)
    return done.stdout
