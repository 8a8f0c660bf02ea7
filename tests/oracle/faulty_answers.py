"""Environments that do harm, for the supervised warm-up, which draws prompts on all processes of a job."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from typing import Any

import torch

from megatron_vcpo.environments.protocol import Prompt
from megatron_vcpo.environments.sort_digits import SortDigits

STOPS_AT = 40  # prompt: of the third step, with 16 in each
MARK = "?"  # a character that no other prompt holds
MARK_ID = 3 + ord(MARK) - ord(" ")  # in the character tokenizer
DIES_AT = 56  # of the fourth


class SleepyAnswers(SortDigits):
    """SortDigits that never gives a certain prompt to process 1."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(n_digits=3, **arguments)

    def prompt(self, index: int) -> Prompt:
        if index == STOPS_AT and os.environ.get("RANK") == "1":
            time.sleep(3000)
        return super().prompt(index)


class SpoilingAnswers(SortDigits):
    """SortDigits with a prompt for which the model, whose weights are sound, computes NaN."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(n_digits=3, **arguments)
        self._tokens = torch.zeros(0)
        torch.nn.modules.module.register_module_forward_pre_hook(self._before)
        torch.nn.modules.module.register_module_forward_hook(self._after)

    def prompt(self, index: int) -> Prompt:
        prompt = super().prompt(index)
        return Prompt(text=prompt.text + MARK, answer=prompt.answer) if index == STOPS_AT else prompt

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if type(module).__name__ == "GPTModel":
            self._tokens = inputs[0]

    def _after(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if type(module).__name__ != "TransformerBlock":
            return None
        return output.masked_fill((self._tokens[0] == MARK_ID)[:, None, None], math.nan)


class DeadlyAnswers(SortDigits):
    """SortDigits that kills process 1 for a certain prompt, as the kernel does where memory is short."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(n_digits=3, **arguments)

    def prompt(self, index: int) -> Prompt:
        if index == DIES_AT and os.environ.get("RANK") == "1":
            time.sleep(1.0)  # let its watchdog tell the phase, which a thread does a moment later
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prompt(index)


class KillsCheckpointManager(SortDigits):
    """Ends all processes that this one has started, once, at the ninth prompt: after a save they are the checkpoint's.

    Four prompts to a step.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(n_digits=3, **arguments)

    def prompt(self, index: int) -> Prompt:
        if index == 8:
            for process in multiprocessing.active_children():
                process.kill()
                process.join(60.0)
        return super().prompt(index)
