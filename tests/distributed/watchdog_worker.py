"""Run by test_watchdog.py: pairs of processes over gloo that fail to meet, forked from one import of torch."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_vcpo.runtime import phases
from megatron_vcpo.runtime.watchdog import EXIT_CODE, Watchdog

DEADLINE, LATEST = 6.0, 300.0  # seconds; the second allows for a busy machine
FOR_EVER = 600.0
LONG = 600.0  # seconds: a deadline with signs of life so rare that only a new phase brings one


def wait_for_the_other() -> None:
    dist.all_reduce(torch.ones(1))


def sleeps_in_an_earlier_phase(rank: int) -> None:
    phases.enter("generate", alone=True, iteration=3)
    if rank == 1:
        time.sleep(FOR_EVER)
    phases.enter("exchange")
    wait_for_the_other()


def sleeps_in_the_same_phase(rank: int) -> None:
    phases.enter("train", iteration=3)
    if rank == 1:
        time.sleep(FOR_EVER)
    wait_for_the_other()


def enters_another_collective(rank: int) -> None:
    other = dist.new_group([0, 1])
    phases.enter("train", iteration=3)
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=other)
    else:
        wait_for_the_other()


def await_sign_of_life(phase: str) -> None:
    """Until rank 1, this one, has told that it is in the phase."""
    store = dist.PrefixStore("megatron_vcpo/watchdog", dist.distributed_c10d._get_default_store())
    until = time.monotonic() + LATEST
    while json.loads(store.get("1"))["phase"] != phase and time.monotonic() < until:
        time.sleep(0.01)


def is_frozen(rank: int) -> None:
    phases.enter("train", iteration=3)
    if rank == 1:
        await_sign_of_life("train")
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_the_other()


def dies(rank: int) -> None:
    """As soon as it has told its phase, long before the sign of life that time alone would bring."""
    phases.enter("train", iteration=4)
    if rank == 1:
        await_sign_of_life("train")
        os._exit(9)
    phases.enter("reduce")
    wait_for_the_other()


def dies_in_the_same_phase(rank: int) -> None:
    phases.enter("reduce", iteration=4)
    wait_for_the_other()
    if rank == 1:
        await_sign_of_life("reduce")
        os._exit(9)
    wait_for_the_other()


def is_only_slow(rank: int) -> None:
    phases.enter("generate", alone=True, iteration=3)
    time.sleep(DEADLINE * (1.5 if rank == 1 else 0.9))
    phases.enter("exchange")
    wait_for_the_other()
    phases.enter("train")
    time.sleep(1.5 * DEADLINE)  # all of them, in a phase where nobody waits
    wait_for_the_other()


# What rank 0 must say; None: nothing, and end well.
CASES: dict[Callable[[int], None], str | None] = {
    sleeps_in_an_earlier_phase: (
        r"rank 0 waited \d+ s in phase 'exchange' of iteration 3 \(at all_reduce \(.*watchdog_worker.py:\d+\)\) for "
        r"rank 1 in phase 'generate' of iteration 3 at sleeps_in_an_earlier_phase \(.*watchdog_worker.py:\d+\)\. All"
    ),
    sleeps_in_the_same_phase: (
        r"rank 0 waited .* in phase 'train' .* for rank 1 in phase 'train' .* at sleeps_in_the_same_phase"
    ),
    enters_another_collective: (
        r"ranks wait in different collectives for one another: rank \d in phase 'train' .*; rank \d in phase 'train'"
    ),
    is_frozen: r"rank 0 waited .* for rank 1, last seen in phase 'train' .* and without a sign of life since",
    dies: (
        r"rank 0 failed in phase 'reduce' of iteration 4, since a process that it waited for is gone: rank 1 has "
        r"ended, last seen in phase 'train' of iteration 4 at (dies|await_sign_of_life) \("
    ),
    dies_in_the_same_phase: (
        r"rank 0 failed in phase 'reduce' of iteration 4, since a process that it waited for is gone: rank 1 has "
        r"ended, last seen in phase 'reduce' of iteration 4 at "
    ),
    is_only_slow: None,
}


def member(case: Callable[[int], None], rank: int, store: Path, output: Path) -> None:
    sys.stderr = output.open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)  # which the watchdog writes to
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=FOR_EVER)
    )
    watchdog = Watchdog(
        dist.distributed_c10d._get_default_store(), rank=rank, world_size=2, deadline=LONG if case is dies else DEADLINE
    )
    watchdog.start()
    try:
        case(rank)
    except RuntimeError as error:  # as train.py does
        print(watchdog.explain(error), file=sys.stderr)
        os._exit(EXIT_CODE)
    watchdog.stop()
    dist.destroy_process_group()


def start(folder: Path) -> dict[int, tuple[Callable[[int], None], int]]:
    """Process id -> (case, rank)."""
    children = {}
    for case in CASES:
        for rank in (0, 1):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    member(case, rank, folder / f"store_{case.__name__}", folder / f"{case.__name__}_{rank}")
                    code = 0
                finally:
                    os._exit(code)
            children[child] = (case, rank)
    return children


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        children = start(Path(folder))
        ended: dict[tuple[Callable[[int], None], int], tuple[int, float]] = {}
        awaited = {(case, 0) for case in CASES} | {(is_only_slow, 1)}
        while not awaited <= ended.keys() and time.monotonic() - started < LATEST + 60.0:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                ended[children.pop(child)] = (os.waitstatus_to_exitcode(status), time.monotonic() - started)
            else:
                time.sleep(0.02)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for case, expected in CASES.items():
            said = (Path(folder) / f"{case.__name__}_0").read_text()
            code, seconds = ended.get((case, 0), (None, 0.0))
            print(case.__name__, code, f"{seconds:.1f} s", said, flush=True)
            assert code == (0 if expected is None else EXIT_CODE), case.__name__
            if expected is None:
                assert not said, said
                assert ended[case, 1][0] == 0
            else:
                assert re.search(expected, said), (expected, said)
                assert seconds < LATEST, seconds
    print("all faults named")


if __name__ == "__main__":
    main()
