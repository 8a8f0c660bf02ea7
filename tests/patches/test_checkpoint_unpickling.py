"""A checkpoint that would run code where it is loaded is refused before any of it runs."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_vcpo.checkpoint.torch_dist import TorchDistFolder
from megatron_vcpo.config import ConfigError
from megatron_vcpo.launch import preflight
from megatron_vcpo.launch.failures import failure_sentence
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.patches import checkpoint_unpickling
from megatron_vcpo.patches.checkpoint_unpickling import UnreadableCheckpoint
from tests.oracle.single_process import single_process_megatron


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.made}",)


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        checkpoint_unpickling.apply()
        yield


def save(folder: Path, extra: Any = None) -> Path:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    folder.mkdir()
    weight = ShardedTensor.from_rank_offsets("weight", torch.arange(6.0))
    dist_checkpointing.save({"weight": weight, "args": argparse.Namespace(extra=extra)}, str(folder))
    return folder


def common(folder: Path) -> Any:
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_common_state_dict(str(folder))


def test_what_a_checkpoint_needs_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "good", extra=[torch.float16, Path("x"), {"a": 1.0}])
    assert common(folder)["args"].extra == [torch.float16, Path("x"), {"a": 1.0}]
    metadata = FileSystemReader(folder).read_metadata()
    assert metadata.state_dict_metadata["weight"].size == (6,)
    assert metadata.storage_meta.load_id is not None


def test_metadata_that_calls_a_function_is_refused_before_it_does(tmp_path: Path) -> None:
    folder, made = save(tmp_path / "bad"), tmp_path / "made"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(made)))
    sentence = r"/bad/\.metadata cannot be read \(UnpicklingError: it names posix\.system, which no checkpoint needs\)"
    with pytest.raises(UnreadableCheckpoint, match=sentence):
        FileSystemReader(folder).read_metadata()
    with pytest.raises(CheckpointError, match=sentence):  # the converters and the verifier
        TorchDistFolder(folder)
    args = argparse.Namespace(load=str(tmp_path), ckpt_step=None, finetune=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    folder.rename(tmp_path / "release")
    with pytest.raises(ConfigError, match=r"^--load: .*/release/\.metadata cannot be read"):
        preflight._check_load(args, sizes=True)
    pickled = tmp_path / "release" / "__0.metadata"
    pickled.write_bytes((tmp_path / "release" / ".metadata").read_bytes())
    with pytest.raises(CheckpointException, match=r"/release/\.metadata cannot be read"):
        common(tmp_path / "release")
    (tmp_path / "release" / ".metadata").unlink()
    with pytest.raises(CheckpointException, match=r"/release/__0\.metadata cannot be read"):
        common(tmp_path / "release")
    assert not made.exists()


def test_an_object_that_calls_a_function_is_refused_before_it_does(tmp_path: Path) -> None:
    made = tmp_path / "made"
    folder = save(tmp_path / "bad", extra=Evil(made))
    with pytest.raises(CheckpointException) as caught:
        common(folder)
    said = str(failure_sentence(caught.value, argparse.Namespace(save=None), None))
    assert "The object common_state/shard_0_1 of the checkpoint cannot be read" in said
    with pytest.raises(CheckpointError, match="common_state/shard_0_1 of the checkpoint cannot be read"):
        TorchDistFolder(folder).common()
    torch.save({"args": Evil(made)}, folder / "common.pt")
    with pytest.raises(pickle.UnpicklingError, match="posix"):
        common(folder)
    with pytest.raises(CheckpointError, match=r"The arguments in .*/bad cannot be read"):
        TorchDistFolder(folder).common()
    assert not made.exists()


@pytest.mark.parametrize("name", ["Metadata.__init__", "os.system", "MetadataIndex.__class__"])
def test_no_dotted_name_leads_out_of_the_classes(name: str) -> None:
    reading = checkpoint_unpickling.MetadataUnpickler
    module = "torch.distributed.checkpoint.metadata"
    data = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
    with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
        reading(io.BytesIO(data + b"\x93.")).load()


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", "/etc/passwd"])
def test_metadata_that_names_a_file_outside_is_refused(tmp_path: Path, path: str) -> None:
    folder = save(tmp_path / "bad")
    metadata = FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnreadableCheckpoint, match="which lies outside"):
        FileSystemReader(folder).read_metadata()


def test_stock_torch_still_runs_what_metadata_names(tmp_path: Path) -> None:
    """When this fails, the half of patches/checkpoint_unpickling.py that reads `.metadata` can go."""
    made = tmp_path / "made"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(made)))
    with pytest.raises(AttributeError):
        FileSystemReader.read_metadata.__wrapped__(FileSystemReader(tmp_path))
    assert made.exists()


def test_stock_torch_still_runs_what_objects_name() -> None:
    """When this fails, the half of patches/checkpoint_unpickling.py that reads objects can go."""
    assert "weights_only=False" in inspect.getsource(DefaultLoadPlanner.load_bytes.__wrapped__)
