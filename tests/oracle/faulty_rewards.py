"""An environment whose reward does what the response says."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from megatron_vcpo.environments.protocol import EnvironmentSetupError, Prompt


class Unspeakable(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class FaultyRewards:
    def __init__(self, *, split: str, seed: int, broken: bool = False) -> None:
        if broken:
            raise EnvironmentSetupError("the data is gone.")
        self.split = split

    def prompt(self, index: int) -> Prompt:
        return Prompt(text=f"{index}", answer=index)

    def reward(self, prompt: Prompt, response: str):
        kind, _, argument = response.partition(" ")
        if kind == "value":
            return float(argument)
        if kind == "sleep":
            time.sleep(float(argument))
            return 1.0
        if kind == "python":
            return eval(argument, {"np": np})
        if kind == "raise":
            raise ValueError(argument)
        if kind == "unspeakable":
            raise Unspeakable
        if kind == "exit":
            os._exit(3)
        if kind == "sys-exit":
            sys.exit(3)
        if kind == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "deaf":  # ignores the polite request to end
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        if kind == "modules":
            return {"reward": 0.0} | {name: float(name in sys.modules) for name in ("torch", "vllm", "megatron.core")}
        if kind == "pid":
            return os.getpid()
        if kind == "split":
            return {"reward": 1.0, "eval": self.split == "eval"}
        raise AssertionError(kind)
