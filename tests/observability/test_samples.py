"""samples.jsonl over resumes."""

import errno
import json
from pathlib import Path

import pytest

from megatron_vcpo.observability.samples import SamplesLog
from tests.oracle.trajectories import trajectory


def samples(folder, next_group=0, decode=str):
    return SamplesLog(folder, next_group=next_group, decode_prompt=str, decode_response=decode)


def groups(log):
    return [json.loads(line)["group"] for line in log.path.read_text().splitlines()]


def test_what_a_lost_run_wrote_past_its_checkpoint_is_moved_away(tmp_path):
    log = samples(tmp_path, 0)
    for group in range(6):
        log.append([trajectory(group_id=group)], version=group)
    with log.path.open("a") as file:
        file.write('{"group": 3, "pro')  # torn by a kill
    lost = log.path.read_text().splitlines()[4:]
    resumed = samples(tmp_path, 4)
    assert groups(resumed) == [0, 1, 2, 3]
    assert (tmp_path / "samples.cut.1.jsonl").read_text().splitlines() == lost
    resumed.append([trajectory(group_id=4)], version=4)
    assert groups(resumed) == [0, 1, 2, 3, 4]


def test_a_new_run_in_the_same_folder_keeps_the_samples_of_the_earlier_ones(tmp_path):
    for group in (7, 8, 9):
        samples(tmp_path, 0).append([trajectory(group_id=group)], version=0)
    found = [json.loads((tmp_path / f"samples{n}.jsonl").read_text())["group"] for n in (".1", ".2", "")]
    assert found == [7, 8, 9]


def test_a_line_torn_within_a_letter_is_cut_off(tmp_path):
    (tmp_path / "samples.jsonl").write_bytes('{"group": 0}\n{"group": 1, "prompt": "é'.encode()[:-1])
    assert groups(samples(tmp_path, 4)) == [0]


def test_half_a_character_in_the_name_of_a_part_is_written_as_it_is(tmp_path):
    log = samples(tmp_path)
    log.append([trajectory(reward_parts={"a\ud800é": 1.0})], version=0)
    assert json.loads(log.path.read_text(encoding="utf-8"))["parts"] == {"a\ud800é": 1.0}
    assert groups(samples(tmp_path, 1)) == [0]


def test_a_response_is_shown_as_it_was_judged(tmp_path):
    log = samples(tmp_path, decode=lambda ids: f"judged {ids[0]}")
    log.append([trajectory()], version=0)
    record = json.loads(log.path.read_text())
    assert (record["prompt"], record["response"]) == ("[5, 6]", "judged 7")


def test_a_full_disk_names_the_version_and_the_file():
    log = SamplesLog.__new__(SamplesLog)
    log.path, log._decode_prompt, log._decode_response = Path("/dev/full"), str, str
    with pytest.raises(OSError, match=r"of version 3 could not be written: No space left.*'/dev/full'") as caught:
        log.append([trajectory(group_id=0)], version=3)
    assert caught.value.errno == errno.ENOSPC
