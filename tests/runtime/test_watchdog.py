"""The verdict over the ranks' standings, and a thread that is watched."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_vcpo.runtime import phases
from megatron_vcpo.runtime.watchdog import EXIT_CODE, Standing, Watchdog, verdict


def standing(rank: int, **changes) -> Standing:
    fields = {
        "rank": rank,
        "number": 7,
        "phase": "exchange",
        "iteration": 3,
        "alone": False,
        "seconds": 70.0,
        "waiting": 0.0,
        "place": f"f (a.py:{rank})",
        "beat": 9,
    }
    return Standing(**fields | changes)


def behind(rank: int, **changes) -> Standing:
    return standing(rank, number=6, phase="generate", alone=True, **changes)


def test_a_rank_in_an_earlier_phase_is_named_with_its_phase_and_place():
    said = verdict([standing(0), behind(1), standing(2)], 60.0)
    assert said == (
        "rank 0 and 1 more waited 70 s in phase 'exchange' of iteration 3 (at f (a.py:0)) for "
        "rank 1 in phase 'generate' of iteration 3 at f (a.py:1)"
    )


@pytest.mark.parametrize(
    "table",
    [
        [standing(0, seconds=59.0), behind(1)],  # not yet
        [standing(0), standing(1)],  # a long phase in which nobody waits
        [standing(0, waiting=30.0), standing(1)],  # one collective of a long phase
        [standing(0, alone=True), behind(1)],  # those in front need nobody
    ],
)
def test_slowness_alone_ends_nothing(table):
    assert verdict(table, 60.0) is None


def test_in_one_phase_the_rank_outside_of_collectives_is_the_missing_one():
    said = verdict([standing(0, waiting=65.0), standing(1), standing(2, waiting=65.0)], 60.0)
    assert said is not None
    assert said.endswith("for rank 1 in phase 'exchange' of iteration 3 at f (a.py:1)")


def test_ranks_in_different_collectives_are_a_mismatch_that_names_both_places():
    said = verdict([standing(0, waiting=65.0), standing(1, waiting=66.0), standing(2, waiting=66.0)], 60.0)
    assert said is not None
    assert said.startswith("ranks wait in different collectives for one another")
    assert "a.py:0" in said
    assert "a.py:1" in said


def test_ranks_that_all_wait_in_one_place_are_not_called_a_mismatch():
    said = verdict([standing(rank, waiting=65.0, place="f (a.py:1)") for rank in (0, 1)], 60.0)
    assert said is not None
    assert said.startswith("all ranks wait in one collective that does not end, for 60 s at least: rank 0 in phase")


def test_the_dead_and_the_unborn_are_missing_wherever_they_stood():
    said = verdict([standing(0), standing(1, number=8, alive=False), None], 60.0)
    assert said is not None
    assert "for rank 2, which never began; rank 1, last seen in phase 'exchange'" in said
    assert said.endswith("and without a sign of life since")


def test_a_thousand_missing_ranks_fit_into_one_sentence():
    said = verdict([standing(0), *(behind(rank) for rank in range(1, 1000))], 60.0)
    assert said is not None
    assert said.endswith("and 991 more ranks")
    assert len(said) < 1000


def test_the_watched_thread_may_be_slow_and_a_missing_rank_ends_it(tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    messages: list[str] = []
    ended = threading.Event()

    def end(message: str) -> None:
        messages.append(message)
        ended.set()

    phases.enter("generate", alone=True, iteration=5)
    watchdog = Watchdog(store, rank=0, world_size=2, deadline=0.6, end=end)
    watchdog.start()
    time.sleep(0.9)
    assert not messages
    started = time.monotonic()
    phases.enter("exchange")
    assert ended.wait(60.0)
    assert time.monotonic() - started > 0.4
    assert "in phase 'exchange' of iteration 5" in messages[0]
    assert "for rank 1, which never began" in messages[0]
    assert "--vcpo-phase-deadline (0.6 s)" in messages[0]
    watchdog.stop()
    phases.enter("start", iteration=0)


PARENT = """
import os, subprocess, sys, time
child = "import time; from megatron_vcpo.runtime.watchdog import end_with_torchrun; end_with_torchrun(3)"
subprocess.Popen([sys.executable, "-c", child + "; print('on', flush=True); time.sleep(%d); print('lived on')"])
time.sleep(600)
"""


@pytest.mark.parametrize("launcher", ["torchrun", "a shell"])
@pytest.mark.slow
def test_a_rank_ends_with_a_torchrun_that_is_killed_and_with_no_other_parent(launcher):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    if launcher == "torchrun":
        environment["TORCHELASTIC_RUN_ID"] = "x"
    lifetime = 600 if launcher == "torchrun" else 8  # seconds of a rank that nothing ends
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT % lifetime],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "on\n"
    parent.kill()
    last, said = parent.communicate(timeout=900)  # until the rank has ended too: it holds the same pipes
    if launcher == "torchrun":
        assert f"megatron_vcpo: rank 3 ends: torchrun (process {parent.pid}), which started it, is gone." in said
        assert last == ""
    else:
        assert said == ""
        assert last == "lived on\n"


STUCK = """
import logging, sys, threading
from megatron_vcpo.runtime import logs, watchdog
logs.configure(rank=0)
logging.getLogger("megatron_vcpo").handlers[0].acquire()
threading.Timer(0.5, watchdog._end_process, ["rank 1 did not come"]).start()
while True:
    sys.stdout.write("nobody reads this")
"""


@pytest.mark.slow
def test_a_process_ends_with_its_message_though_the_training_thread_holds_the_locks_of_its_output():
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    stuck = subprocess.Popen(
        [sys.executable, "-c", STUCK], env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert stuck.stdout is not None
    assert stuck.stderr is not None
    try:
        assert stuck.wait(100.0) == EXIT_CODE
        assert stuck.stderr.read() == "megatron_vcpo: rank 1 did not come\n"
    finally:
        stuck.kill()
        stuck.stdout.close()
        stuck.stderr.close()


@pytest.mark.distributed
def test_processes_that_do_not_meet_end_within_the_deadline_and_slow_ones_do_not():
    worker = Path(__file__).parents[1] / "distributed" / "watchdog_worker.py"
    root = worker.parents[2]
    done = subprocess.run(
        [sys.executable, str(worker)],
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert "all faults named" in done.stdout, done.stdout + done.stderr[-4000:]
