"""What becomes of the trajectories of a step that was skipped, and what the samples show."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_vcpo.config import PluginConfig
from megatron_vcpo.environments import EnvironmentSetupError, Prompt
from megatron_vcpo.flow.base import BaseFlow, StepBatch
from megatron_vcpo.flow.colocated import RolloutFlow
from megatron_vcpo.flow.supervised import SupervisedFlow
from megatron_vcpo.rollout.decode import ResponseDecoder
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_models import EOS, character_tokenizer
from tests.oracle.trajectories import trajectory


class Flow(BaseFlow):
    def __init__(self, folder: Path, retries: int) -> None:
        args = SimpleNamespace(rank=0, save=str(folder), curr_iteration=0, train_iters=9)
        config = PluginConfig()
        config.vcpo.overflow_retries = retries
        super().__init__(args, config, SimpleNamespace(vocab_size=9))
        self.kept: list[StepBatch] = []

    def put_back(self, batch: StepBatch) -> None:
        self.kept.append(batch)


@pytest.fixture(scope="module", autouse=True)
def groups():
    with single_process_megatron() as collection:
        yield collection


@pytest.mark.parametrize(
    ("success", "overflow", "tried", "allowed", "kept"),
    [
        (False, 1.0, 0, 1, True),
        (False, 1.0, 1, 1, False),  # once is the default
        (False, 1.0, 1, 2, True),
        (False, 1.0, 0, 0, False),  # consumed
        (False, 0.0, 0, 1, False),  # NaN, or nothing to train on: no retry would help
        (True, 0.0, 0, 1, False),
    ],
)
def test_only_an_overflow_keeps_its_trajectories_and_only_so_often(tmp_path, success, overflow, tried, allowed, kept):
    flow = Flow(tmp_path, allowed)
    batch = StepBatch(trajectories=[trajectory()], lags=[2], retries=tried)
    flow.after_step({"skipped": float(not success), "overflow": overflow}, batch=batch, success=success, model=[])
    assert flow.kept == ([batch] if kept else [])
    assert flow.version == int(success)
    assert flow.counters.get("skipped_steps", 0.0) == float(not success)
    assert flow.counters.get("retried_steps", 0.0) == float(kept)


def test_samples_show_a_response_as_the_judge_sees_it(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</answer>"]})
    flow = SimpleNamespace(
        config=PluginConfig(),
        args=SimpleNamespace(rank=0),
        inputs=SimpleNamespace(tokenizer=tokenizer, decode=ResponseDecoder(tokenizer)),
        run_dir=tmp_path,
        sampler=SimpleNamespace(drawn=0),
        _samples=None,
    )
    flow.config.rollout.save_trajectories = 1
    RolloutFlow._open_samples(flow)
    ids = np.array([*tokenizer.encode("2</answer>"), EOS], np.int32)
    flow._samples.append([trajectory(response_ids=ids)], version=0)
    assert json.loads((tmp_path / "samples.jsonl").read_text())["response"] == "2</answer>"


@pytest.mark.parametrize("fields", [{"text": "1\ud800", "answer": "1"}, {"text": "1", "answer": "1\ud800"}])
def test_a_warm_up_names_the_example_that_no_tokenizer_takes(fields):
    flow = SimpleNamespace(
        config=PluginConfig(),
        inputs=SimpleNamespace(
            tokenizer=character_tokenizer(), environment=SimpleNamespace(prompt=lambda index: Prompt(**fields))
        ),
    )
    with pytest.raises(EnvironmentSetupError, match=r"prompt\(3\) of .* holds a lone surrogate"):
        SupervisedFlow._example(flow, 3)
