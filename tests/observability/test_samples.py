"""samples.jsonl over resumes."""

import errno
import json
from pathlib import Path

import pytest

from megatron_vcpo.observability.samples import SamplesLog
from tests.oracle.trajectories import trajectory


def groups(log):
    return [json.loads(line)["group"] for line in log.path.read_text().splitlines()]


def test_what_a_lost_run_wrote_past_its_checkpoint_is_cut_off(tmp_path):
    log = SamplesLog(tmp_path, next_group=0, decode=str)
    for group in range(6):
        log.append([trajectory(group_id=group)], version=group)
    with log.path.open("a") as file:
        file.write('{"group": 3, "pro')  # torn by a kill
    resumed = SamplesLog(tmp_path, next_group=4, decode=str)
    assert groups(resumed) == [0, 1, 2, 3]
    resumed.append([trajectory(group_id=4)], version=4)
    assert groups(resumed) == [0, 1, 2, 3, 4]


def test_a_new_run_in_the_same_folder_keeps_the_samples_of_the_earlier_ones(tmp_path):
    for group in (7, 8, 9):
        SamplesLog(tmp_path, next_group=0, decode=str).append([trajectory(group_id=group)], version=0)
    found = [json.loads((tmp_path / f"samples{n}.jsonl").read_text())["group"] for n in (".1", ".2", "")]
    assert found == [7, 8, 9]


def test_a_line_torn_within_a_letter_is_cut_off(tmp_path):
    (tmp_path / "samples.jsonl").write_bytes('{"group": 0}\n{"group": 1, "prompt": "é'.encode()[:-1])
    assert groups(SamplesLog(tmp_path, next_group=4, decode=str)) == [0]


def test_a_full_disk_names_the_version_and_the_file():
    log = SamplesLog.__new__(SamplesLog)
    log.path, log._decode = Path("/dev/full"), str
    with pytest.raises(OSError, match=r"of version 3 could not be written: No space left.*'/dev/full'") as caught:
        log.append([trajectory(group_id=0)], version=3)
    assert caught.value.errno == errno.ENOSPC
