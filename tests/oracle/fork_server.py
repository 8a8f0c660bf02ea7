"""Stands in for `python` where a test starts a program: forks it from a process that has imported the libraries.

Importing torch and Megatron takes 8 seconds of a core, vLLM 4 more. This process does it once, and starts no thread, no
process group and no region of OpenMP, so that a fork of it is what a new process is after the same imports: it gets
arguments, environment, folder and the three streams of the process that asks (fork_client.py), runs the program as
`__main__`, and ends as an interpreter ends. Not multiprocessing's forkserver: its children know that they have a
parent, start their own children in another way, and end without the interpreter's last steps.

What differs from new processes: sets of strings have one order in all ranks (one hash seed), OMP_NUM_THREADS is 1, CUDA
is aliased to the CPU from the start, and an import has happened whether the program would have made it or not. Tests of
such things start real processes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
MEGATRON = ("transformers", "megatron.core", "megatron.training", "megatron.training.checkpointing")
VLLM = ("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker")
_PATIENCE = 30.0  # seconds between SIGTERM and SIGKILL, as torchrun has it
_LAUNCHER = "torch.distributed.run"
_set_by_imports: dict[str, str] = {}  # variables of the environment


@dataclass
class Program:
    """What a process runs, as the words behind `python` say it."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    streams: list[int]  # descriptors of stdin, stdout and stderr
    processes: int | None = None  # of torchrun; None: one process without it
    quiet: bool = False  # -W ignore
    unbuffered: bool = False  # -u

    def __post_init__(self) -> None:
        """Take Python's options and torchrun's off the arguments. Raises ValueError on one that is not known here."""
        self._take_options()
        if self.arguments[:2] == ["-m", _LAUNCHER]:
            if self.arguments[2:4] != ["--standalone", "--nproc-per-node"]:
                raise ValueError(f"torchrun with {self.arguments[2:4]}")
            self.processes = int(self.arguments[4])
            # torchrun starts its ranks with -u, and hands no -W on
            self.arguments, self.quiet, self.unbuffered = self.arguments[5:], False, True
        if self.arguments[0].startswith("-") and self.arguments[0] not in ("-m", "-c"):
            raise ValueError(f"Python's option {self.arguments[0]}")

    def _take_options(self) -> None:
        while self.arguments[0] in ("-W", "-u"):
            option = self.arguments.pop(0)
            if option == "-u":
                self.unbuffered = True
            elif self.arguments.pop(0) == "ignore":
                self.quiet = True
            else:
                raise ValueError("another -W than ignore")

    def run(self) -> None:
        """Become the program; what it raises goes to the interpreter."""
        self._take_over()
        kind, *rest = self.arguments
        if kind == "-m":
            sys.path.insert(0, self.folder)
            sys.argv = ["-m", *rest[1:]]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        else:
            sys.path.insert(0, str(Path(kind).resolve().parent))
            sys.argv = [kind, *rest]
            runpy.run_path(kind, run_name="__main__")

    def _take_over(self) -> None:
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(_set_by_imports | self.environment | {"OMP_NUM_THREADS": "1"})
        tempfile.tempdir = None
        named = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:1] = [path for path in named if path]
        importlib.invalidate_caches()
        for module, seed in (("torch", "seed"), ("numpy.random", "seed")):  # as at the start of any process
            getattr(sys.modules[module], seed)()
        if self.quiet:
            sys.warnoptions[:] = ["ignore"]
            warnings.simplefilter("ignore", append=True)
        if self.unbuffered or self.environment.get("PYTHONUNBUFFERED"):
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]


class Launch:
    """The parent of one program's processes, in the place of torchrun or of a shell."""

    def __init__(self, connection: socket.socket, program: Program) -> None:
        self._connection = connection
        self._program = program
        self._ranks: dict[int, int] = {}  # process: rank
        self._statuses: dict[int, int] = {}  # rank: status of wait
        self._owner = os.getppid()

    def start(self) -> Program | None:
        """In a child its program; None in the parent, which has sent the status when it returns."""
        if self._program.processes is None:
            return self._program if self._fork(0) == 0 else self._end()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(self._program.processes):
                if self._fork(rank) == 0:
                    self._program.environment |= self._rank_variables(rank, port)
                    return self._program
            return self._end(self._store(listener.detach(), port))

    def _fork(self, rank: int) -> int:
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0) if self._program.processes is None else os.setsid()
            self._connection.close()
        else:
            self._ranks[process] = rank
        return process

    def _rank_variables(self, rank: int, port: int) -> dict[str, str]:
        world = str(self._program.processes)
        return {
            **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), world),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"fork_{os.getppid()}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }

    @staticmethod
    def _store(listener: int, port: int) -> Any:
        """torchrun's store, which outlives its ranks; it has threads, so it comes after the forks."""
        from torch.distributed import TCPStore

        return TCPStore(
            host_name="127.0.0.1", port=port, is_master=True, wait_for_workers=False, master_listen_fd=listener
        )

    def _end(self, store: Any = None) -> None:
        """Wait for all; the first that fails ends the others, and so does whoever asked for them by going away."""
        watched = {os.pidfd_open(process): process for process in self._ranks}
        ended_at: float | None = None
        while watched:
            ready = select.select([self._connection, *watched], [], [], 1.0)[0]
            if self._connection in ready or os.getppid() != self._owner:
                self._signal(signal.SIGKILL)
                os._exit(1)
            for end in ready:
                process = watched.pop(end)
                self._statuses[self._ranks.pop(process)] = os.waitpid(process, 0)[1]
                os.close(end)
            if ended_at is None and any(self._statuses.values()):
                ended_at = time.monotonic()
                self._report()
                self._signal(signal.SIGTERM)
            if ended_at is not None and time.monotonic() - ended_at > _PATIENCE:
                self._signal(signal.SIGKILL)
        failed = any(self._statuses.values())
        status = self._statuses[0] if self._program.processes is None else int(failed) << 8
        self._connection.sendall(str(status).encode())
        del store

    def _signal(self, number: int) -> None:
        for process in self._ranks:
            try:
                os.killpg(process, number)
            except ProcessLookupError:  # it does not lead its group yet
                os.kill(process, number)

    def _report(self) -> None:
        if self._program.processes is None:
            return
        for rank, status in self._statuses.items():
            if status:
                line = f"rank {rank} failed: exitcode  : {os.waitstatus_to_exitcode(status)} (it ends the others)\n"
                os.write(self._program.streams[2], line.encode())


def receive(connection: socket.socket) -> Program:
    """What fork_client.py has sent: a length and three descriptors, then JSON."""
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as file:
        said = json.loads(file.read(int.from_bytes(length, "big")))
    return Program(**said, streams=streams)


def serve(plain: socket.socket, with_vllm: socket.socket, lifeline: int) -> Program:
    """Answer until the process that holds the other end of the lifeline is gone; returns in the forks only."""
    open_for = {plain: False, with_vllm: True}
    while True:
        ready = select.select([*open_for, lifeline], [], [])[0]
        while _has_children() and os.waitpid(-1, os.WNOHANG)[0]:
            pass
        if lifeline in ready:
            _end_now(0)
        listener = ready[0]
        if open_for[listener] and len(open_for) > 1:  # a second server, from now on
            del open_for[listener]
            if _fork() > 0:
                listener.close()
                continue
            plain.close()
            import_vllm()
            open_for = {listener: False}
            continue
        connection = listener.accept()[0]
        if _fork() > 0:
            connection.close()
            continue
        for each in open_for:
            each.close()
        os.close(lifeline)
        program = Launch(connection, receive(connection)).start()
        if program is not None:
            return program
        _end_now(0)


def _has_children() -> bool:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return bool(file.read())


def _fork() -> int:
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"an import has started {threads - 1} threads, which a fork would lack")
    return os.fork()


def _end_now(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)


def import_megatron() -> None:
    """What every program of the project imports, in the order in which they do."""
    before = dict(os.environ)
    importlib.import_module("megatron_vcpo.patches.modelopt_without_vllm").apply()
    importlib.import_module("megatron_vcpo.patches.megatron_cpu").install()
    for name in MEGATRON:
        importlib.import_module(name)
    _set_by_imports.update({k: v for k, v in os.environ.items() if before.get(k) != v})
    _settle()


def import_vllm() -> None:
    """As the engine does: in its turn, so that nothing of the process changes but what an engine would have changed."""
    from megatron_vcpo.engines.vllm import engine

    with engine.EngineTurn(engine._VARIABLES | engine.logging_variables()):
        for name in VLLM:
            importlib.import_module(name)
    _settle()


def _settle() -> None:
    gc.collect()
    gc.freeze()  # pages that a collection in a child does not write to stay shared


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    ends = [socket.socket(fileno=int(number)) for number in sys.argv[1:3]]
    import_megatron()
    serve(*ends, int(sys.argv[3])).run()
