"""An environment whose reward does what the response says."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from megatron_vcpo.environments.protocol import EnvironmentSetupError, Prompt


def foreign_descriptors() -> list[int]:
    """Every open one but the standard three; their numbers are those of the trainer, which may have hundreds open."""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2]


class Unspeakable(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class FaultyRewards:
    """`seconds` to build; where the file `marker` exists, `then` says what becomes of one that is built again."""

    def __init__(
        self, *, split: str, seed: int, broken: bool = False, seconds: float = 0.0, marker: str = "", then: str = ""
    ) -> None:
        if broken:
            raise EnvironmentSetupError("the data is gone.")
        time.sleep(seconds)
        self.split = split
        self.marker = marker
        if marker and Path(marker).exists():
            self.reward(Prompt(text=""), then)

    def prompt(self, index: int) -> Prompt:
        return Prompt(text=f"{index}", answer=index)

    def reward(self, prompt: Prompt, response: str):
        kind, _, argument = response.partition(" ")
        return getattr(self, f"do_{kind.replace('-', '_')}")(argument)

    def do_value(self, argument: str):
        return float(argument)

    def do_sleep(self, argument: str):
        time.sleep(float(argument))
        return 1.0

    def do_python(self, argument: str):
        return eval(argument, {"np": np})

    def do_raise(self, argument: str):
        raise ValueError(argument)

    def do_unspeakable(self, _argument: str):
        raise Unspeakable

    def do_exit(self, argument: str):
        os._exit(int(argument))

    def do_sys_exit(self, _argument: str):
        sys.exit(3)

    def do_segfault(self, _argument: str):
        os.kill(os.getpid(), signal.SIGSEGV)

    def do_deaf(self, _argument: str):
        """Ignore the polite request to end."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    def do_stop(self, _argument: str):
        """With all of its group."""
        os.killpg(0, signal.SIGSTOP)

    def do_kill_group(self, _argument: str):
        os.killpg(0, signal.SIGKILL)

    def do_hold(self, _argument: str):
        """No other thread of the process runs: the interpreter's lock is held for hours."""
        re.match("(a+)+b", "a" * 40)

    def do_mark(self, argument: str):
        Path(self.marker).touch()
        return self.reward(Prompt(text=""), argument)

    def do_start(self, argument: str):
        """Processes of all kinds, whose numbers go to a file; then as said."""
        file, _, then = argument.partition(" ")
        nap = ["sleep", "600"]
        pids = [os.getpid(), subprocess.Popen(nap).pid, subprocess.Popen(nap, start_new_session=True).pid]
        orphan = subprocess.run(["sh", "-c", "setsid sleep 600 >&- 2>&- & echo $!"], stdout=subprocess.PIPE, check=True)
        pids.append(int(orphan.stdout))
        Path(f"{file}.part").write_text(" ".join(map(str, pids)))
        Path(f"{file}.part").rename(file)
        return self.reward(Prompt(text=""), then)

    def do_fork(self, _argument: str):
        """Both processes come back."""
        return float(os.fork() == 0)

    def do_alarm(self, _argument: str):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return 1.0

    def do_scribble(self, _argument: str):
        for descriptor in foreign_descriptors():
            try:
                os.write(descriptor, b"not for you" * 9)
            except OSError:
                continue
        return 1.0

    def do_close(self, _argument: str):
        for descriptor in foreign_descriptors():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        time.sleep(60)

    def do_print(self, argument: str):
        print(argument)
        return 1.0

    def do_modules(self, _argument: str):
        return {"reward": 0.0} | {name: float(name in sys.modules) for name in ("torch", "vllm", "megatron.core")}

    def do_pid(self, _argument: str):
        return os.getpid()

    def do_split(self, _argument: str):
        return {"reward": 1.0, "eval": self.split == "eval"}
