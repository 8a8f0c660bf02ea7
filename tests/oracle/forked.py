"""`python` for programs that import torch, Megatron and vLLM: the fork server of this test session."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_OF_PYTHON = ("PYTHONPATH", "PYTHONUNBUFFERED")  # which each program has from its own environment
_LONGEST = 80  # bytes of a folder's path: a socket's own may have 107


class ForkServer:
    """Starts at the first use; ends with this process at the latest."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="forks_", dir=parent if len(parent) < _LONGEST else "/tmp"))
        listeners = [self._listen(name) for name in ("plain", "vllm")]
        watched, self._lifeline = os.pipe()
        numbers = [*(listener.fileno() for listener in listeners), watched]
        with (self.folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_HERE / "fork_server.py"), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if k not in _OF_PYTHON} | {"OMP_NUM_THREADS": "1"},
                pass_fds=numbers,
                start_new_session=True,
            )
        os.close(watched)
        for listener in listeners:
            listener.close()

    def close(self) -> None:
        """Programs that still run are ended."""
        os.close(self._lifeline)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _listen(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.folder / name))
        listener.listen()
        return listener

    def command(self, *, vllm: bool) -> list[str]:
        """What stands for `sys.executable` at the head of a command."""
        return [sys.executable, "-IS", str(_HERE / "fork_client.py"), str(self.folder / ("vllm" if vllm else "plain"))]


@functools.cache
def _server() -> ForkServer:
    server = ForkServer()
    atexit.register(server.close)
    return server


def forked_python(*, vllm: bool = False) -> list[str]:
    """The head of a command that starts a program in no time, with `vllm` also one that builds an engine.

    The rest is what would stand behind `python`: options -u and -W ignore, then a script, -m or -c; also `-m
    torch.distributed.run --standalone --nproc-per-node N`. See fork_server.py for what is not as in a new process.
    """
    return _server().command(vllm=vllm)
