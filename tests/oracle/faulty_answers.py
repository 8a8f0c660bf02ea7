"""An environment that stops one process of a job: for the supervised warm-up, which draws prompts on all of them."""

from __future__ import annotations

import os
import time
from typing import Any

from megatron_vcpo.environments.protocol import Prompt
from megatron_vcpo.environments.sort_digits import SortDigits

STOPS_AT = 40  # prompt: of the third step, with 16 in each


class SleepyAnswers(SortDigits):
    """SortDigits that never gives a certain prompt to process 1."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(n_digits=3, **arguments)

    def prompt(self, index: int) -> Prompt:
        if index == STOPS_AT and os.environ.get("RANK") == "1":
            time.sleep(300)
        return super().prompt(index)
