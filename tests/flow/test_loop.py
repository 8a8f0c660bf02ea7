"""What becomes of the trajectories of a step that was skipped, and what the samples show."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_vcpo.config import PluginConfig
from megatron_vcpo.data.minibatch import Minibatch
from megatron_vcpo.environments import EnvironmentSetupError, Prompt
from megatron_vcpo.flow import assembly
from megatron_vcpo.flow.loop import Loop
from megatron_vcpo.flow.supervised import SupervisedLoop
from megatron_vcpo.mcore.step.outcome import StepOutcome, Verdict
from megatron_vcpo.rollout.decode import ResponseDecoder
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_models import EOS, character_tokenizer
from tests.oracle.trajectories import trajectory


class Kept(Loop):
    """Notes what is put back."""

    def __init__(self, folder: Path, retries: int) -> None:
        args = SimpleNamespace(rank=0, save=str(folder), curr_iteration=0, train_iters=9)
        config = PluginConfig()
        config.vcpo.overflow_retries = retries
        super().__init__(args, config, SimpleNamespace(vocab_size=9))
        self.kept: list[Minibatch] = []

    def put_back(self, minibatch: Minibatch) -> None:
        self.kept.append(minibatch)


@pytest.fixture(scope="module", autouse=True)
def groups():
    with single_process_megatron() as collection:
        yield collection


@pytest.mark.parametrize(
    ("verdict", "tried", "allowed", "kept"),
    [
        (Verdict.OVERFLOW, 0, 1, True),
        (Verdict.OVERFLOW, 1, 1, False),  # once is the default
        (Verdict.OVERFLOW, 1, 2, True),
        (Verdict.OVERFLOW, 0, 0, False),  # consumed
        (Verdict.SKIPPED, 0, 1, False),  # NaN, or nothing to train on: no retry would help
        (Verdict.TRAINED, 0, 1, False),
    ],
)
def test_only_an_overflow_keeps_its_trajectories_and_only_so_often(tmp_path, verdict, tried, allowed, kept):
    loop = Kept(tmp_path, allowed)
    minibatch = Minibatch(trajectories=(trajectory(),), lags=(2,), retries=tried)
    loop.settle(minibatch, StepOutcome(verdict=verdict, metrics={}))
    assert loop.kept == ([dataclasses.replace(minibatch, retries=tried + 1)] if kept else [])
    assert loop.version == int(verdict is Verdict.TRAINED)
    counters = loop.journal.counters
    assert counters.get("skipped_steps", 0.0) == float(verdict is not Verdict.TRAINED)
    assert counters.get("retried_steps", 0.0) == float(kept)


def test_samples_show_a_response_as_the_judge_sees_it(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</answer>"]})
    config = PluginConfig()
    config.rollout.save_trajectories = 1
    inputs = SimpleNamespace(tokenizer=tokenizer, decode=ResponseDecoder(tokenizer))
    samples = assembly.open_samples(SimpleNamespace(rank=0), config, inputs, tmp_path, next_group=0)
    ids = np.array([*tokenizer.encode("2</answer>"), EOS], np.int32)
    samples.append([trajectory(response_ids=ids)], version=0)
    assert json.loads((tmp_path / "samples.jsonl").read_text())["response"] == "2</answer>"


@pytest.mark.parametrize("fields", [{"text": "1\ud800", "answer": "1"}, {"text": "1", "answer": "1\ud800"}])
def test_a_warm_up_names_the_example_that_no_tokenizer_takes(fields):
    loop = SimpleNamespace(
        config=PluginConfig(),
        inputs=SimpleNamespace(
            tokenizer=character_tokenizer(), environment=SimpleNamespace(prompt=lambda index: Prompt(**fields))
        ),
    )
    with pytest.raises(EnvironmentSetupError, match=r"prompt\(3\) of .* holds a lone surrogate"):
        SupervisedLoop._example(loop, 3)
