"""What happens in the engine's turn stays in it, and comes back at its next turn where it must."""

from __future__ import annotations

import logging
import os
import random
import warnings

import numpy as np
import pytest
import torch

from megatron_vcpo.engines.process_state import EngineTurn


def misbehave() -> None:
    """What vLLM does to a process, and some more."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    torch.set_num_threads = lambda number: None
    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("medium")
    os.environ["ENGINE_SETS"] = "1"
    os.environ["TRAINER_HAS"] = "changed"
    os.environ.pop("TRAINER_NEEDS", None)
    warnings.simplefilter("error")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def state() -> tuple[object, ...]:
    return (
        random.getstate(),
        np.random.get_state()[1].tobytes(),
        torch.get_rng_state().numpy().tobytes(),
        torch.set_num_threads,
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        dict(os.environ),
        list(warnings.filters),
        logging.root.manager.disable,
        os.sched_getaffinity(0),
    )


@pytest.fixture
def turn(monkeypatch):
    monkeypatch.setenv("TRAINER_HAS", "its own")
    monkeypatch.setenv("TRAINER_NEEDS", "this")
    monkeypatch.setenv("USER_CHOSE", "the user's")
    monkeypatch.delenv("ENGINE_WANTS", raising=False)
    return EngineTurn({"ENGINE_WANTS": "0", "USER_CHOSE": "the engine's"})


def test_nothing_of_the_engine_is_left_outside_its_turn(turn):
    before = state()
    with turn:
        misbehave()
    assert state() == before


def test_nothing_is_left_when_the_engine_fails(turn):
    before = state()

    def fail() -> None:
        with turn:
            misbehave()
            raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        fail()
    assert state() == before


def test_the_engine_finds_its_environment_again_at_each_turn(turn):
    with turn:
        assert os.environ["ENGINE_WANTS"] == "0"
        misbehave()
    os.environ["TRAINER_HAS"] = "something new"
    with turn:
        assert os.environ["ENGINE_SETS"] == "1"
        assert os.environ["ENGINE_WANTS"] == "0"
        assert "TRAINER_NEEDS" not in os.environ
    assert os.environ["TRAINER_HAS"] == "something new"
    assert os.environ["TRAINER_NEEDS"] == "this"


def test_what_the_user_set_wins_over_the_engine_s_default(turn):
    with turn:
        assert os.environ["USER_CHOSE"] == "the user's"


def test_only_errors_are_heard_during_a_turn(turn, caplog):
    with turn:
        warnings.warn("many of these", stacklevel=1)
        logging.getLogger("vllm").warning("and these")
        logging.getLogger("vllm").error("but this")
    logging.getLogger("vllm").warning("and then this")
    assert caplog.messages == ["but this", "and then this"]


def test_a_call_from_inside_a_call_is_refused(turn):
    before = state()
    with turn, pytest.raises(RuntimeError, match="inside another"), turn:
        pass
    assert state() == before
