"""The trackers, with a real TensorBoard writer and a real offline wandb run read back from their files."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from megatron_vcpo.observability.trackers import Trackers

STEPS: list[dict[str, float]] = [
    {"iteration": 1, "train_iters": 2, "reward": 0.25, "time/train": 1.5, "skipped": 0},
    {"iteration": 2, "train_iters": 2, "reward": 0.5, "time/train": 1.25, "skipped": 1, "rho": math.nan},
]


def test_tensorboard_holds_every_value_at_its_iteration(tmp_path: Path) -> None:
    writer = SummaryWriter(log_dir=str(tmp_path))
    trackers = Trackers(writer, None)
    for metrics in STEPS:
        trackers.log(metrics)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"vcpo/reward", "vcpo/time/train", "vcpo/skipped", "vcpo/rho"}
    assert [(event.step, event.value) for event in events.Scalars("vcpo/reward")] == [(1, 0.25), (2, 0.5)]
    assert [event.step for event in events.Scalars("vcpo/rho")] == [2]


def read_wandb_history(run_dir: Path) -> list[dict[str, Any]]:
    """The logged rows of an offline run: protobuf records in LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    data = file.read_bytes()
    position, record, history = 7, b"", []
    while position < len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            message = wandb_internal_pb2.Record.FromString(record)
            items = message.history.item
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            record = b""
    return [row for row in history if row]


def test_wandb_offline_holds_every_value_at_its_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="test", name="test")
    trackers = Trackers(None, wandb)
    for metrics in STEPS:
        trackers.log(metrics)
    run.finish()
    wandb.teardown()  # waits for the process that writes the file
    history = read_wandb_history(tmp_path)
    assert [(row["_step"], row["vcpo/reward"], row["vcpo/time/train"]) for row in history] == [
        (1, 0.25, 1.5),
        (2, 0.5, 1.25),
    ]
    assert "vcpo/train_iters" not in history[0]


def test_without_writers_nothing_happens() -> None:
    Trackers(None, None).log(STEPS[0])
