"""samples.jsonl over resumes."""

import json

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


def test_a_new_run_in_the_same_folder_starts_an_empty_file(tmp_path):
    SamplesLog(tmp_path, next_group=0, decode=str).append([trajectory(group_id=0)], version=0)
    assert groups(SamplesLog(tmp_path, next_group=0, decode=str)) == []
