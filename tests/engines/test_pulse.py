"""Signs of life, with a clock of our own."""

from __future__ import annotations

import os

import pytest

from megatron_vcpo.engines import pulse
from megatron_vcpo.engines.pulse import Listener, Pulse


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    return now


def test_silence_grows_without_beats_and_ends_with_one(clock):
    mine = Pulse()
    theirs = Pulse(os.dup(mine.fileno()))
    listener = Listener(mine)
    for seconds in range(1, 5):
        clock[0] += 1.0
        assert listener.silence() == seconds
    theirs._counter[0] += 1
    clock[0] += 1.0
    assert listener.silence() == 0.0
    clock[0] += 1.0
    assert listener.silence() == 1.0
    for end in (theirs, mine, mine):
        end.close()


def test_what_the_looker_slept_through_is_no_silence_of_the_other(clock):
    mine = Pulse()
    listener = Listener(mine)
    clock[0] += 3600.0  # Ctrl-Z and fg: both were stopped
    assert listener.silence() == pulse._LONGEST_STEP
    mine.close()
