"""An engine in a process of its own, on the trainer's machine.

`ProcessEngine` is a `RolloutEngine` for the trainer; its child process hosts the real engine and communicates through a
pipe. Weights do not go through the pipe but through memory that both sides map (sync/transports/channel.py). Every wait
ends: with the answer, when the child exits, or at a deadline, at which the child is killed because its state is
unknown. Generating and scoring have no deadline; a child that gives no sign of life meanwhile is killed
(engines/pulse.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from megatron_vcpo.data.trajectory import Float32Array
from megatron_vcpo.engines.log import grown, size_of
from megatron_vcpo.engines.protocol import (
    EngineError,
    EngineSettings,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    Sampling,
)
from megatron_vcpo.engines.pulse import Listener, Pulse
from megatron_vcpo.runtime import logs
from megatron_vcpo.sync.receiver import UpdateReport
from megatron_vcpo.sync.transports.channel import BucketSender, WeightDelivery, receive_buckets

_START = 900.0  # seconds to start the engine: it may compile and capture graphs
_END = 20.0  # seconds to shut it down
_GLANCE = 1.0  # seconds between checks whether the other process is alive
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR")
"""torchrun's variables, besides TORCHELASTIC_*, which the child must not inherit: the engine is not a rank of the
trainer's world."""


class ProcessEngine:
    """`RolloutEngine` in a child process, one for each trainer rank.

    Args:
        settings: of the engine in the child, which is its only rank.
        rank: of the trainer process, for messages.
        timeout: longest wait, in seconds, for the child in any phase of an update, and longest silence of a child that
            generates or scores.
        bucket_bytes: size of each of the two slots for weights.
    """

    def __init__(self, settings: EngineSettings, *, rank: int, timeout: float, bucket_bytes: int) -> None:
        """Start the child and wait until its engine runs. Raises EngineError if it fails."""
        self.version: int | None = None
        self._rank = rank
        self._timeout = timeout
        self._bucket_bytes = bucket_bytes
        self._sender: BucketSender | None = None
        self._last = "(none yet)"
        self._log_file = settings.log_file
        self._log_size = size_of(settings.log_file)
        self._pipe, theirs = Pipe()
        _limit_blocking(self._pipe, timeout)
        self._pulse = Pulse()
        self._process = _spawn(theirs, self._pulse, rank)
        theirs.close()
        self._post(("start", settings, torch.get_num_threads()))
        try:
            self.float32_weights: frozenset[str] = self._answer("start", _START)
        except EngineError:
            self.shutdown()
            raise

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return f"the engine process {self._process.pid} of rank {self._rank}"

    # -- the protocol ------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, progress: bool
    ) -> list[GenerationResult]:
        """See `Generator.generate`."""
        self._require_weights()
        self._post(("generate", list(requests), sampling, progress))
        return self._answer("generate")

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[Float32Array]:
        """See `Generator.score`."""
        self._require_weights()
        self._post(("score", [list(ids) for ids in sequences], list(prompt_lengths)))
        return self._answer("score")

    def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], version: int, *, verify: bool = False
    ) -> UpdateReport:
        """See `WeightReceiver.update_weights`. Raises EngineError naming the tensor, the process and the rank."""
        self.version = None
        self._last = "(none yet)"
        self._post(("update", version, verify))
        try:
            for name, tensor in weights:
                sender = self._sender_for(tensor)
                sender.add(name, tensor)
                self._last = name
            if self._sender is not None:
                self._sender.finish()
        except EngineError:
            self._forget()
            raise
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        self._post(("end",))
        try:
            report = self._answer(f"finish the update to version {version}", self._timeout)
        except EngineError:
            self._forget()
            raise
        self.version = version
        return report

    def shutdown(self) -> None:
        """See `Generator.shutdown`."""
        self.version = None
        if self._process.poll() is None:
            try:
                self._pipe.send(("shutdown",))
                self._process.wait(_END)
            except (OSError, subprocess.TimeoutExpired):
                self._end()
        self._pipe.close()
        self._pulse.close()
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    # -- weights -----------------------------------------------------------------------------------------------------

    def _require_weights(self) -> None:
        if self.version is None:
            raise EngineError(
                f"{self.name.capitalize()} has no complete set of weights (none has come yet, or the last update "
                "failed); call update_weights() first."
            )

    def _sender_for(self, tensor: torch.Tensor) -> BucketSender:
        if self._sender is None:
            delivery = _delivery(tensor.device)
            self._sender = BucketSender(delivery, self._post, self._taken, bucket_bytes=self._bucket_bytes)
        if self._last == "(none yet)":
            self._sender.begin()
        return self._sender

    def _taken(self, what: str) -> int:
        return self._answer(f"read {what}", self._timeout, kind="taken")

    def _abandon(self, reason: str) -> None:
        """The trainer could not produce the rest: tell the child, which drops what it has received and confirms."""
        self._post(("abort", reason))
        with contextlib.suppress(EngineError):  # the child answers that it has no complete weights now
            self._answer("drop an update", self._timeout)
        self._forget()

    def _forget(self) -> None:
        if self._sender is not None:
            self._sender.forget()

    # -- the pipe ----------------------------------------------------------------------------------------------------

    def _post(self, message: tuple[Any, ...]) -> None:
        try:
            self._pipe.send(message)
        except BlockingIOError as error:  # the child has not read from the pipe for too long
            raise self._silent(f"be told to {message[0]}") from error
        except OSError as error:
            raise self._gone(f"be told to {message[0]}") from error

    def _answer(self, what: str, timeout: float | None = None, kind: str = "done") -> Any:
        """The child's answer; EngineError if it failed, exited, took longer than `timeout` seconds or fell silent.

        Without a timeout it may take as long as it likes, as long as it gives signs of life.
        """
        end = None if timeout is None else time.monotonic() + timeout
        listener = Listener(self._pulse)
        while True:
            try:
                if self._pipe.poll(_GLANCE if end is None else max(0.0, min(_GLANCE, end - time.monotonic()))):
                    answer, value = self._pipe.recv()
                    if answer == "failed":
                        raise EngineError(f"In {self.name}: {value}")
                    if answer == kind:
                        return value
                    continue  # "taken", from an update that was aborted
            except BlockingIOError as error:  # the answer stopped halfway
                raise self._silent(what) from error
            except (EOFError, OSError) as error:
                raise self._gone(what) from error
            if self._process.poll() is not None and not self._pipe.poll():
                raise self._gone(what)
            if end is None and listener.silence() >= self._timeout:
                raise self._silent(what)
            if end is not None and time.monotonic() >= end:
                self._end()
                raise EngineError(
                    f"Rank {self._rank} waited {timeout:g} seconds for {self.name} to {what} (last tensor given: "
                    f"{self._last}); the process was ended."
                )

    def _silent(self, what: str) -> EngineError:
        self.version = None
        self._end()
        return EngineError(
            f"{self.name.capitalize()} gave no sign of life for {self._timeout:g} seconds (--sync-timeout) while it "
            f"was to {what}, and was ended: something had stopped it (a signal, swapped-out memory, a hung device). "
            "See to its machine, and go on from the last checkpoint with --load."
        )

    def _gone(self, what: str) -> EngineError:
        self.version = None
        try:
            code: Any = self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._end()
            code = "none: it had closed its pipe"
        return EngineError(
            f"{self.name.capitalize()} is gone (exit code {code}); it was to {what} (last tensor given: {self._last})."
            + grown(self._log_file, self._log_size)
        )

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


def _delivery(device: torch.device) -> WeightDelivery:
    if device.type == "cuda":
        from megatron_vcpo.sync.transports.cuda_ipc import CudaIpcDelivery

        return CudaIpcDelivery(device)
    from megatron_vcpo.sync.transports.shared_memory import SharedMemoryDelivery

    return SharedMemoryDelivery()


def _limit_blocking(pipe: Connection, seconds: float) -> None:
    """Make a read or write of the pipe that is blocked for so long raise BlockingIOError: the other side is stopped.

    This limits only messages that have begun; poll() waits for their begin.
    """
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:  # on Unix a duplex Pipe is a socket
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _spawn(pipe: Connection, pulse: Pulse, rank: int) -> subprocess.Popen[bytes]:
    """Run this module as a program with one end of the pipe; multiprocessing's children would import the main
    module."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (*_LAUNCHER, "MASTER_PORT") and not name.startswith("TORCHELASTIC_")
    }
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if torch.version.cuda and torch.cuda.is_available() and torch.cuda.is_initialized():
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = devices[torch.cuda.current_device()]
    # The kernel kills the child when the thread that started it ends, so only a child of the main thread may ask for
    # that.
    bound = threading.current_thread() is threading.main_thread()
    level = logging.getLogger(logs.LOGGER).getEffectiveLevel()
    numbers = [pipe.fileno(), pulse.fileno(), os.getpid(), int(bound), rank, level]
    command = [sys.executable, "-m", "megatron_vcpo.engines.process", *map(str, numbers)]
    return subprocess.Popen(command, pass_fds=(pipe.fileno(), pulse.fileno()), env=environment)


# -- in the child ----------------------------------------------------------------------------------------------------


class _Host:
    """Serves one engine until the pipe closes."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._engine: RolloutEngine | None = None
        self._indices: dict[int, Any] = {}
        self._opener: Any = None

    def serve(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                break
            if message[0] == "shutdown":
                break
            try:
                self._pipe.send(("done", self._do(*message)))
            except EngineError as error:
                self._pipe.send(("failed", str(error)))
            except (EOFError, BrokenPipeError):  # the trainer is gone
                break
            except Exception as error:  # noqa: BLE001 - reported to the trainer, which decides
                self._pipe.send(("failed", f"{type(error).__name__}: {error}"))
        if self._engine is not None:
            self._engine.shutdown()

    def _do(self, what: str, *arguments: Any) -> Any:
        if what == "start":
            settings, threads = arguments
            torch.set_num_threads(threads)
            self._engine = settings.build()
            return self._engine.float32_weights
        assert self._engine is not None
        match what:
            case "generate":
                requests, sampling, progress = arguments
                return self._engine.generate(requests, sampling, progress=progress)
            case "score":
                return self._engine.score(*arguments)
            case "update":
                return self._update(self._engine, *arguments)
        raise EngineError(f"an unexpected message {what!r} came")

    def _update(self, engine: RolloutEngine, version: int, verify: bool) -> UpdateReport:
        if self._opener is None:
            self._opener = _opener()
        weights = receive_buckets(
            self._pipe.recv, lambda number: self._pipe.send(("taken", number)), self._opener, self._indices
        )
        try:
            return engine.update_weights(weights, version, verify=verify)
        finally:
            for _ in weights:  # the engine failed early, but the sender continues to the end
                pass


def _opener() -> Any:
    if torch.cuda.is_available():
        from megatron_vcpo.sync.transports.cuda_ipc import CudaIpcOpener

        return CudaIpcOpener()
    from megatron_vcpo.sync.transports.shared_memory import SharedMemoryOpener

    return SharedMemoryOpener()


def _end_with(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(_GLANCE)
    os._exit(1)


def _be_killed_with_owner() -> None:
    """Have the kernel kill this process when its owner dies; a stopped process could not run a thread that watches.

    If the kernel refuses, only the watching thread remains.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def main() -> None:
    """Run by `ProcessEngine`. Arguments: pipe and pulse descriptors, the trainer's process id, 1 if its main thread
    asks, the trainer's rank and log level: the child's messages look like its trainer's."""
    descriptor, pulse, owner, bound, rank, level = (int(argument) for argument in sys.argv[1:])
    logs.configure(rank=rank, level=level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    if bound:
        _be_killed_with_owner()
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()  # works even if the owner has already exited
    threading.Thread(target=Pulse(pulse).beat, daemon=True).start()
    _Host(Connection(descriptor)).serve()


if __name__ == "__main__":
    main()
