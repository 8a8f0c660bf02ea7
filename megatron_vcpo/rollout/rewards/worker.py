"""The code of a reward worker: build the environment, then judge one response after the other."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import sys
from dataclasses import asdict
from io import TextIOWrapper
from typing import Any

from megatron_vcpo.environments import Environment, EnvironmentSetupError, make_environment
from megatron_vcpo.rollout.rewards.outcome import RewardOutcome, checked, rejected

LENGTH = struct.Struct("<Q")
"""Precedes each message: its size in bytes. The trainer sends pickles but receives JSON, which cannot make it run
code."""

NUMBER = struct.Struct("<Q")
"""Precedes each task: its number, which the answer repeats, so that it cannot be taken for another task's."""


def serve(work: socket.socket) -> None:
    """Build the environment that the first message describes, then judge the others until the trainer closes the
    socket.

    `logging` is not configured here: that is up to the environment, and the trainer reports rejected rewards.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # so that the output of a killed reward is not lost
    setup = _receive(work)
    if setup is None:
        return
    try:
        environment = make_environment(*pickle.loads(setup))
    except EnvironmentSetupError as error:
        _send(work, {"problem": str(error)})
        return
    _send(work, {"problem": None})
    me = os.getpid()
    while (task := _receive(work)) is not None:
        number = NUMBER.unpack_from(task)[0]
        _send(work, {"taken": number})
        outcome = _judge(environment, task[NUMBER.size :])
        if os.getpid() != me:
            os._exit(1)  # a fork that a reward made and that returned from it
        signal.setitimer(signal.ITIMER_REAL, 0.0)  # an alarm that a reward left set would hit the next one
        _send(work, {"number": number, "outcome": asdict(outcome)})


def _judge(environment: Environment, pair: bytes) -> RewardOutcome:
    try:
        prompt, response = pickle.loads(pair)
        return checked(environment.reward(prompt, response))
    except BaseException as error:  # noqa: BLE001 - any failure costs only this trajectory, and is counted
        return rejected("raised", f"the reward raised {type(error).__name__}{_words(error)}")


def _words(error: BaseException) -> str:
    try:
        return f": {error}"
    except BaseException:  # noqa: BLE001 - an error that cannot even be printed
        return ""


def _receive(work: socket.socket) -> bytes | None:
    """The next message; None if the trainer has closed the socket."""
    head = _exactly(work, LENGTH.size)
    return None if head is None else _exactly(work, LENGTH.unpack(head)[0])


def _exactly(work: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = work.recv_into(view[filled:])
        if count == 0:
            return None
        filled += count
    return bytes(data)


def _send(work: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    work.sendall(LENGTH.pack(len(text)) + text)
