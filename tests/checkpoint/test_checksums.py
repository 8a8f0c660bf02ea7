"""A checkpoint whose files were cut or changed is refused by the file's name, or is the one that was saved."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vcpo.checkpoint import checksums
from megatron_vcpo.checkpoint.guard import loaded_iteration
from megatron_vcpo.checkpoint.save_folder import check_folders
from megatron_vcpo.config import ConfigError
from megatron_vcpo.flow.resume import load_loop_state, load_reference, save_reference
from megatron_vcpo.launch import preflight
from megatron_vcpo.mcore.reference import ReferencePolicy
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.patches import checkpoint_unpickling
from megatron_vcpo.patches.checkpoint_unpickling import UnreadableCheckpoint
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_gpt import build_tiny_gpt

POSITIONS = 50  # of each file
STEP = "iter_0000012"
REFERENCE = "kl_reference/tp1_pp1_ep1_rank00000.safetensors"
FILES = [
    f"{STEP}/__0_0.distcp",
    f"{STEP}/.metadata",
    f"{STEP}/metadata.json",
    f"{STEP}/common.pt",
    f"{STEP}/mp_rank_00/train_dataloader_dprank000.pt",
    f"{STEP}/{checksums.MANIFEST}",
    REFERENCE,
    "latest_checkpointed_iteration.txt",
]
FLOW = {"rows": torch.arange(200), "seed": 7, "words": ["a", "b"]}
REFUSALS = (CheckpointError, ConfigError, UnreadableCheckpoint)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    with single_process_megatron() as groups:
        checkpoint_unpickling.apply()
        yield build_tiny_gpt(groups)


@pytest.fixture(scope="module")
def saved(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What --save holds after iteration 12: a small model with every kind of file."""
    from megatron.core import dist_checkpointing

    run = tmp_path_factory.mktemp("run")
    step = run / STEP
    (step / "mp_rank_00").mkdir(parents=True)
    dist_checkpointing.save({"model": model_state(tiny), "args": argparse.Namespace(layers=2)}, str(step))
    torch.save({"args": argparse.Namespace(layers=2)}, step / "common.pt")  # as Megatron kept them until 0.18
    torch.save({"dataloader_state_dict": FLOW}, step / "mp_rank_00" / "train_dataloader_dprank000.pt")
    checksums.write(step)
    save_reference(ReferencePolicy(tiny.model), run / REFERENCE)
    (run / "latest_checkpointed_iteration.txt").write_text("12")
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def model_state(tiny: Any) -> Any:
    from megatron.core.utils import unwrap_model

    (chunk,) = unwrap_model(tiny.model)
    return chunk.sharded_state_dict(metadata={"singleton_local_shards": False})


def start(run: Path, tiny: Any, *, verify: bool = True, finetune: bool = False) -> dict[str, Any]:
    """What a run reads when it is resumed, in the order of the run; refused, or all that it goes on from."""
    from megatron.core import dist_checkpointing

    args = argparse.Namespace(
        load=str(run), save=None, ckpt_step=None, finetune=finetune, iteration=12, pipeline_model_parallel_size=1
    )
    check_folders(args)
    assert args.load == str(run)
    folder = loaded_iteration(args)
    preflight._check_load(args, sizes=verify)
    if verify:
        checksums.verify(folder, rollout_state=not finetune)
    found = {"common": dist_checkpointing.load_common_state_dict(str(folder))["args"]}
    found |= dist_checkpointing.load({"model": model_state(tiny)}, str(folder))["model"]
    if not finetune:
        found["flow"] = load_loop_state(args)
    reference = ReferencePolicy(tiny.model)
    load_reference(reference, run / REFERENCE)
    return {**found, **reference.state_dict()}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key]) if torch.is_tensor(value) else repr(value) == repr(second[key])
        for key, value in first.items()
    )


def damages(data: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """Cut, and with one bit changed, at positions that follow from the file's name."""
    rng = random.Random(name)
    for number in range(POSITIONS):
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        if number % 2:
            yield f"cut at {at}", data[:at]
        else:
            yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_by_its_name_or_loads_as_it_was(run: Path, tiny: Any, name: str) -> None:
    expected, file = start(run, tiny), run / name
    data = file.read_bytes()
    sentences = {}
    for damage, content in damages(data, name):
        file.write_bytes(content)
        try:
            found = start(run, tiny)
        except REFUSALS as error:
            sentences[damage] = str(error)
        else:
            assert same(found, expected), damage
    assert [pair for pair in sentences.items() if file.name not in pair[1]] == []
    assert len(sentences) > 0.8 * len(dict(damages(data, name)))
    file.write_bytes(data)
    assert same(start(run, tiny), expected)


@pytest.mark.parametrize("name", [f"{STEP}/.metadata", f"{STEP}/mp_rank_00/train_dataloader_dprank000.pt", REFERENCE])
def test_without_checksums_what_cannot_be_read_is_still_named(run: Path, tiny: Any, name: str) -> None:
    """Of these the format itself is checked; values of tensors in a .distcp file are not."""
    from torch.distributed.checkpoint import FileSystemReader

    (run / STEP / checksums.MANIFEST).unlink()
    data, file = (run / name).read_bytes(), run / name
    args = argparse.Namespace(load=str(run), iteration=12, pipeline_model_parallel_size=1)
    sentences = {}
    for damage, content in damages(data, name):
        file.write_bytes(content)
        try:
            if file.suffix == ".pt":
                load_loop_state(args)
            elif file.suffix == ".safetensors":
                load_reference(ReferencePolicy(tiny.model), file)
            else:
                FileSystemReader(run / STEP).read_metadata()
        except REFUSALS as error:
            sentences[damage] = str(error)
    assert [pair for pair in sentences.items() if file.name not in pair[1]] == []
    assert all(damage in sentences for damage, _ in damages(data, name) if damage.startswith("cut"))


def test_a_partial_copy_is_refused_and_one_without_checksums_is_not(run: Path, tiny: Any) -> None:
    state = run / STEP / "mp_rank_00" / "train_dataloader_dprank000.pt"
    state.unlink()
    with pytest.raises(ConfigError, match=r"^--load: .*train_dataloader_dprank000\.pt is missing.*--finetune"):
        start(run, tiny)
    start(run, tiny, finetune=True)  # which does not read it
    (run / STEP / "__0_0.distcp").unlink()
    with pytest.raises(ConfigError, match=r"__0_0\.distcp is missing; copy the checkpoint again"):
        start(run, tiny, finetune=True)
    (run / STEP / checksums.MANIFEST).unlink()
    assert not checksums.verify(run / STEP)


def test_files_that_are_not_listed_and_a_list_half_written_do_not_matter(run: Path, tiny: Any) -> None:
    (run / STEP / "README").write_text("of a person")
    (run / STEP / "vcpo_checksums.partial").write_text("{")
    start(run, tiny)


def test_a_list_cannot_name_what_lies_outside(run: Path) -> None:
    sums = {"../secret": checksums.FileSum(1, "00000000")}
    checksums._write_list(run / STEP / checksums.MANIFEST, sums)
    with pytest.raises(CheckpointError, match=r"vcpo_checksums\.json is damaged: it names '\.\./secret'"):
        checksums.check_sizes(run / STEP)


def test_the_list_is_what_it_says(run: Path) -> None:
    import zlib

    content = json.loads((run / STEP / checksums.MANIFEST).read_text())
    assert set(content["files"]) == {
        str(path.relative_to(run / STEP)) for path in (run / STEP).rglob("*") if path.is_file()
    } - {checksums.MANIFEST}
    for name, (size, crc) in content["files"].items():
        data = (run / STEP / name).read_bytes()
        assert (size, crc) == (len(data), f"{zlib.crc32(data):08x}")


def test_ranks_share_the_files_by_their_bytes_and_leave_none_out() -> None:
    listed = {f"__{i}_0.distcp": checksums.FileSum(size, "0") for i, size in enumerate([9, 1, 1, 7, 2, 8, 3])}
    shares = [checksums._share(listed, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(listed)
    assert max(sum(listed[name].size for name in share) for share in shares) <= 12


def test_a_later_save_without_checksums_leaves_no_old_ones(run: Path) -> None:
    from megatron_vcpo.checkpoint import guard

    guard._finish(run / STEP, verify=False)
    assert not (run / STEP / checksums.MANIFEST).exists()
    guard._finish(run / STEP, verify=True)
    assert checksums.verify(run / STEP)
