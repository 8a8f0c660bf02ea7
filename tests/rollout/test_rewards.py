"""Rewards that misbehave cost one trajectory each, and the pool leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_vcpo.environments import EnvironmentSetupError, Prompt
from megatron_vcpo.rollout.rewards import RewardPool

PROMPT = Prompt(text="?")


def make_pool(*, split="train", workers: int = 2, timeout: float = 1.0, **config) -> RewardPool:
    return RewardPool(
        "tests.oracle.faulty_rewards:FaultyRewards",
        split=split,
        seed=0,
        config=config,
        workers=workers,
        timeout=timeout,
    )


def items(*responses: str) -> list[tuple[Prompt, str]]:
    return [(PROMPT, response) for response in responses]


@pytest.fixture(scope="module")
def pool():
    with make_pool() as pool:
        yield pool


@pytest.mark.parametrize(
    ("response", "kind", "said"),
    [
        ("raise because of this", "raised", "ValueError: because of this"),
        ("unspeakable", "raised", "the reward raised"),
        ("sys-exit", "raised", "SystemExit"),
        ("sleep 30", "timeout", "longer than 1 seconds"),
        ("deaf", "timeout", "longer than 1 seconds"),
        ("exit", "died", "exit code 3"),
        ("segfault", "died", "exit code"),
        ("value nan", "invalid", "not a finite number"),
        ("value -inf", "invalid", "not a finite number"),
        ("python None", "invalid", "not a finite number"),
        ("python '1.0'", "invalid", "not a finite number"),
        ("python 10**400", "raised", "OverflowError"),
        ("python {'accuracy': 1.0}", "invalid", "without 'reward'"),
        ("python {'reward': 1.0, 'accuracy': float('nan')}", "invalid", "accuracy"),
        ("python [1.0]", "invalid", "not a finite number"),
    ],
)
def test_misbehaving_reward_costs_that_one_trajectory(pool, response, kind, said):
    outcomes = pool.judge(items("value 1", response, "value 2", "value 3"))
    assert [outcome.reward for outcome in outcomes] == [1.0, None, 2.0, 3.0]
    assert outcomes[1].kind == kind
    assert said in outcomes[1].error
    assert all(outcome.error is None for outcome in outcomes if outcome.reward is not None)


def test_many_faults_at_once_cost_exactly_their_own_trajectories(pool):
    faults = {3: "sleep 30", 9: "exit", 10: "segfault", 20: "raise x", 31: "value nan", 40: "exit"}
    outcomes = pool.judge(items(*(faults.get(i, f"value {i}") for i in range(64))))
    assert {i for i, outcome in enumerate(outcomes) if outcome.reward is None} == set(faults)
    assert all(outcome.reward == i for i, outcome in enumerate(outcomes) if i not in faults)


def test_deadline_counts_the_reward_not_its_wait_in_the_queue(pool):
    start = time.monotonic()
    outcomes = pool.judge(items(*["sleep 0.4"] * 10))
    assert time.monotonic() - start > 1.5  # longer than the deadline of 1 second
    assert [outcome.reward for outcome in outcomes] == [1.0] * 10


@pytest.mark.parametrize(
    "value", ["True", "3", "np.float32(3)", "np.bool_(True)", "np.array(3)", "{'reward': 3, 'a': 1}"]
)
def test_any_finite_number_is_a_reward(pool, value):
    outcome = pool.judge(items(f"python {value}"))[0]
    assert outcome.reward in (1.0, 3.0)
    assert type(outcome.reward) is float
    assert outcome.parts == ({"a": 1.0} if "'a'" in value else {})


def test_workers_build_the_environment_of_their_split(pool):
    assert pool.judge(items("split"))[0].parts == {"eval": 0.0}
    with make_pool(split="eval", workers=1) as held_out:
        assert held_out.judge(items("split"))[0].parts == {"eval": 1.0}


def test_workers_do_not_import_the_trainer(pool):
    assert pool.judge(items("modules"))[0].parts == {"torch": 0.0, "vllm": 0.0, "megatron.core": 0.0}


def test_environment_that_cannot_be_built_in_a_worker_is_a_setup_error():
    with make_pool(broken=True, workers=1) as pool:
        for _ in range(2):
            with pytest.raises(EnvironmentSetupError, match="the data is gone"):
                pool.judge(items("value 1"))


def test_close_ends_every_worker_even_a_busy_one():
    pool = make_pool(timeout=60.0)
    pids = {int(outcome.reward) for outcome in pool.judge(items(*["pid"] * 20))}
    pool._pool.schedule(time.sleep, args=(60,))
    pool.close()
    pool.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


OWNER = """
import os, sys, time
from megatron_vcpo.environments import Prompt
from megatron_vcpo.rollout.rewards import RewardPool

def main(how):
    name = "tests.oracle.faulty_rewards:FaultyRewards"
    pool = RewardPool(name, split="train", seed=0, config={}, workers=2, timeout=60.0)
    pids = {int(outcome.reward) for outcome in pool.judge([(Prompt(text="?"), "pid")] * 50)}
    for _ in range(2 if how == "killed" else 0):
        pool._pool.schedule(time.sleep, args=(60,))  # a worker that waits for work would notice by itself
    time.sleep(0.5)
    print(*pids, flush=True)
    if how == "raise":
        raise RuntimeError("the trainer broke")
    if how == "killed":
        time.sleep(60)

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize(("how", "as_module"), [("return", False), ("raise", True), ("killed", False)])
def test_workers_end_with_their_owner_however_it_ends(tmp_path, how, as_module):
    (tmp_path / "owner.py").write_text(OWNER)
    root = Path(__file__).parents[2]
    command = ["-m", "owner"] if as_module else [str(tmp_path / "owner.py")]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{root}"}
    process = subprocess.Popen(
        [sys.executable, *command, how],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert pids
    if how == "killed":
        process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert process.returncode == {"return": 0, "raise": 1, "killed": -signal.SIGKILL}[how]
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_worker_killed_between_rewards_costs_nothing():
    with RewardPool("sort_digits", split="train", seed=0, config={}, workers=2, timeout=5.0) as pool:
        prompt = Prompt(text="21:", answer="12")
        assert [outcome.reward for outcome in pool.judge([(prompt, "12")])] == [1.0]
        for _ in range(2):
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # one killed before, which the pool has yet to reap
                    if "spawn_main" in " ".join(child.cmdline()):
                        child.send_signal(signal.SIGKILL)
            outcomes = pool.judge([(prompt, "12"), (prompt, "21")] * 8)
            assert [outcome.reward for outcome in outcomes] == [1.0, 0.0] * 8


def test_a_reward_beyond_fp32_is_no_reward():
    from megatron_vcpo.rollout.rewards import _checked

    assert _checked(1e300).kind == "invalid"
    assert _checked(-3.5e38).kind == "invalid"
    assert _checked(3e38).reward == 3e38
