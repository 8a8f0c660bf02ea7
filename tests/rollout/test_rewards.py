"""Rewards that misbehave cost one trajectory each, and the pool leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_vcpo.environments import EnvironmentSetupError, Prompt
from megatron_vcpo.rollout.rewards.outcome import checked
from megatron_vcpo.rollout.rewards.pool import RewardPool

pytestmark = pytest.mark.slow

PROMPT = Prompt(text="?")


def make_pool(
    *, split="train", workers: int = 2, timeout: float = 1.0, start_timeout: float = 300.0, **config
) -> RewardPool:
    return RewardPool(
        "tests.oracle.faulty_rewards:FaultyRewards",
        split=split,
        seed=0,
        config=config,
        workers=workers,
        timeout=timeout,
        start_timeout=start_timeout,
    )


def items(*responses: str) -> list[tuple[Prompt, str]]:
    return [(PROMPT, response) for response in responses]


@pytest.fixture(scope="module")
def pool():
    with make_pool(timeout=2.0) as pool:
        yield pool


@pytest.mark.parametrize(
    ("response", "kind", "said"),
    [
        ("raise because of this", "raised", "ValueError: because of this"),
        ("raise \ud800", "raised", r"ValueError: \ud800"),
        ("unspeakable", "raised", "the reward raised"),
        ("sys-exit", "raised", "SystemExit"),
        ("sleep 30", "timeout", "longer than 2 seconds"),
        ("deaf", "timeout", "longer than 2 seconds"),
        ("hold", "timeout", "longer than 2 seconds"),
        ("stop", "timeout", "longer than 2 seconds"),
        ("exit 3", "died", "exit code 3"),
        ("exit 0", "died", "exit code 0"),
        ("segfault", "died", "exit code -11"),
        ("scribble", "died", "wrote to a descriptor that was not its own"),
        ("close", "died", "exit code -9"),
        ("kill-group", "died", "exit code -9"),
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
    outcomes[1].error.encode("utf-8")
    assert all(outcome.error is None for outcome in outcomes if outcome.reward is not None)


def test_many_faults_at_once_cost_exactly_their_own_trajectories(pool):
    faults = {3: "sleep 30", 9: "exit 3", 10: "segfault", 20: "raise x", 31: "value nan", 40: "exit 0"}
    outcomes = pool.judge(items(*(faults.get(i, f"value {i}") for i in range(64))))
    assert {i for i, outcome in enumerate(outcomes) if outcome.reward is None} == set(faults)
    assert all(outcome.reward == i for i, outcome in enumerate(outcomes) if i not in faults)


def test_deadline_counts_the_reward_not_its_wait_in_the_queue(pool):
    start = time.monotonic()
    outcomes = pool.judge(items(*["sleep 0.6"] * 10))
    assert time.monotonic() - start > 2.5  # longer than the deadline of 2 seconds
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


def processes_in(file: Path) -> list[int]:
    """What "start" wrote there, once it has."""
    wait_for(file.exists)
    return [int(pid) for pid in file.read_text().split()]


def wait_for(happened) -> None:
    until = time.monotonic() + 300.0
    while not happened():
        assert time.monotonic() < until, "it did not happen in five minutes"
        time.sleep(0.02)


def alive(pids) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid)]


def keepers() -> list[psutil.Process]:
    """Of all pools of this process."""
    return [child for child in psutil.Process().children() if "rewards.keeper" in " ".join(child.cmdline())]


def test_a_reward_that_ends_its_process_costs_no_deadline():
    with make_pool(workers=1, timeout=3600.0) as pool:
        outcomes = pool.judge(items("exit 0", "value 1", "exit 0", "close", "value 2"))
    assert [outcome.kind for outcome in outcomes] == ["died", None, "died", "died", None]


def test_what_a_reward_leaves_behind_does_not_reach_the_next_one():
    with make_pool(workers=1, timeout=30.0) as pool:
        outcomes = pool.judge(items("alarm", "sleep 0.3", "pid", "fork", "pid", "value 7"))
    alarm, sleep, before, fork, after, value = [outcome.reward for outcome in outcomes]
    assert [alarm, sleep, fork, value] == [1.0, 1.0, 0.0, 7.0]
    assert before == after  # no process was lost on the way


def test_what_a_reward_prints_is_seen_though_its_process_is_killed(capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with make_pool(workers=1, timeout=1.0) as pool:
        pool.judge(items("print one line", "sleep 60"))
    assert "one line" in capfd.readouterr().out


@pytest.mark.parametrize("then", ["sleep 60", "hold", "stop", "exit 0"])
def test_what_a_reward_has_started_ends_with_its_worker(tmp_path, then):
    with make_pool(workers=1, timeout=3.0) as pool:
        outcomes = pool.judge(items(f"start {tmp_path / 'pids'} {then}", "value 1"))
        pids = processes_in(tmp_path / "pids")
        assert len(pids) == 4
        assert [outcome.kind for outcome in outcomes] == ["died" if then == "exit 0" else "timeout", None]
        wait_for(lambda: not alive(pids))


def test_close_ends_every_worker_and_what_rewards_have_started(tmp_path):
    pool = make_pool(workers=2, timeout=60.0)
    pool.judge(items(*(f"start {tmp_path / name} value 1" for name in "ab")))
    pids = [*processes_in(tmp_path / "a"), *processes_in(tmp_path / "b")]
    assert len(alive(pids)) == 8
    pool.close()
    pool.close()
    assert not alive(pids)


OWNER = """
import os, sys, time
from megatron_vcpo.environments import Prompt
from megatron_vcpo.rollout.rewards.pool import RewardPool

how, *responses = sys.argv[1:]
name = "tests.oracle.faulty_rewards:FaultyRewards"
pool = RewardPool(name, split="train", seed=0, config={}, workers=2, timeout=3600.0)
fork = os.fork() if how == "kill all but a fork" else None
if fork == 0:
    time.sleep(3600)  # and keep the pool's sockets open
if fork is not None:
    print(fork, flush=True)
pool.judge([(Prompt(text="?"), response) for response in responses])
if how == "raise":
    raise RuntimeError("the trainer broke")
"""


@pytest.mark.parametrize(
    ("how", "as_module", "then"),
    [
        ("return", False, "value 1"),
        ("raise", True, "value 1"),
        ("kill", False, "sleep 3600"),
        ("kill", True, "hold"),
        ("kill", False, "stop"),
        ("kill all but a fork", False, "sleep 3600"),
        ("kill while keepers are stopped", False, "sleep 3600"),
    ],
)
def test_workers_and_what_they_started_end_with_their_owner_however_it_ends(tmp_path, how, as_module, then):
    (tmp_path / "owner.py").write_text(OWNER)  # no guard of its main part: workers do not import it
    command = ["-m", "owner"] if as_module else [str(tmp_path / "owner.py")]
    responses = [f"start {tmp_path / name} {then}" for name in "ab"]
    process = subprocess.Popen(
        [sys.executable, *command, how, *responses],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    pids = [*processes_in(tmp_path / "a"), *processes_in(tmp_path / "b")]
    if how == "kill while keepers are stopped":
        for worker in (pids[0], pids[4]):
            keeper = psutil.Process(worker).parent()
            assert keeper is not None
            keeper.suspend()
    if how.startswith("kill"):
        process.kill()
    assert process.wait(timeout=300) == {"return": 0, "raise": 1}.get(how, -signal.SIGKILL)
    wait_for(lambda: not alive(pids))
    if how == "kill all but a fork":
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
    process.stdout.close()


def test_processes_killed_between_rewards_cost_nothing():
    with make_pool(timeout=30.0) as pool:
        for victims in ("workers", "keepers", "all"):
            assert [outcome.reward for outcome in pool.judge(items("value 1"))] == [1.0]
            found = [*pool_processes(pool, victims)]
            assert len(found) == (4 if victims == "all" else 2)
            for process in found:
                process.kill()
            outcomes = pool.judge(items(*(f"value {i}" for i in range(16))))
            assert [outcome.reward for outcome in outcomes] == list(range(16))


def pool_processes(pool: RewardPool, which: str) -> list[psutil.Process]:
    wait_for(lambda: pool.judge(items("value 0")) and all(process.ready for process in pool._processes))
    mine = {process._keeper.pid for process in pool._processes}
    found = [keeper for keeper in keepers() if keeper.pid in mine]
    workers = [worker for keeper in found for worker in keeper.children()]
    return {"workers": workers, "keepers": found, "all": [*found, *workers]}[which]


def test_a_worker_stopped_between_rewards_costs_time_alone():
    with make_pool(timeout=2.0) as pool:
        pool_processes(pool, "workers")[0].suspend()
        outcomes = pool.judge(items(*(f"value {i}" for i in range(16))))
        assert [outcome.reward for outcome in outcomes] == list(range(16))


def test_the_kernel_ends_a_worker_with_its_keeper():
    with make_pool(workers=1, timeout=30.0) as pool:
        (worker,) = pool_processes(pool, "workers")
        worker.parent().kill()
        wait_for(lambda: not alive([worker.pid]))  # while this process does nothing


def test_a_keeper_killed_while_its_reward_runs_takes_that_with_it(tmp_path):
    with make_pool(workers=1, timeout=3600.0) as pool:
        (keeper,) = pool_processes(pool, "keepers")
        killer = threading.Thread(target=lambda: (processes_in(tmp_path / "pids"), keeper.kill()))
        killer.start()
        outcomes = pool.judge(items(f"start {tmp_path / 'pids'} sleep 3600", "value 1"))
        killer.join()
        assert [outcome.kind for outcome in outcomes] == ["died", None]
        assert "killed from outside" in outcomes[0].error
        worker, child, *others = processes_in(tmp_path / "pids")
        wait_for(lambda: not alive([worker, child]))
        for pid in others:  # in sessions of their own, with nobody left to find them
            os.kill(pid, signal.SIGKILL)


def test_a_hanging_reward_costs_its_own_where_the_environment_takes_long_to_build():
    with make_pool(seconds=1.5, timeout=2.0) as pool:
        outcomes = pool.judge(items("sleep 60", *(f"value {i}" for i in range(15))))
    assert [outcome.kind for outcome in outcomes] == ["timeout"] + [None] * 15
    assert [outcome.reward for outcome in outcomes[1:]] == list(range(15))


@pytest.mark.parametrize("response", ["sleep 60", "hold", "exit 3"])
def test_a_batch_ends_in_time_whatever_its_rewards_do_and_however_long_workers_take_to_start(response):
    with make_pool(seconds=1.0, timeout=0.1) as pool:
        pool.judge(items("value 1"))
        pool._margin = 3.0
        outcomes = pool.judge(items(*[response] * 60))  # 30 for each worker: in 3 s + 30 x 0.1 s, not 30 s and more
        assert {outcome.reward for outcome in outcomes} == {None}
        assert {outcome.kind for outcome in outcomes} <= {"died", "timeout"}
        assert outcomes[-1].kind == "timeout"
        assert "reward processes had to be started again and again" in outcomes[-1].error
        pool._margin, pool._timeout = 300.0, 30.0
        assert pool.judge(items("value 3"))[0].reward == 3.0


def test_an_environment_that_is_never_built_ends_the_run():
    with (
        make_pool(seconds=3600.0, workers=2, start_timeout=0.5) as pool,
        pytest.raises(EnvironmentSetupError, match=r"its environment was not built in 0\.5 seconds"),
    ):
        pool.judge(items("value 1"))


@pytest.mark.parametrize(
    ("then", "starts", "said"),
    [
        ("sleep 3600", 1, "its environment was not built in 1 seconds"),
        ("exit 7", 5, "it ended with exit code 7 while it built the environment"),
    ],
)
def test_an_environment_that_cannot_be_built_again_ends_the_run(tmp_path, then, starts, said):
    with make_pool(workers=1, timeout=30.0, marker=str(tmp_path / "lock"), then=then) as pool:
        pool.judge(items("value 1"))
        if then != "exit 7":
            pool._start_timeout = 1.0
        with pytest.raises(EnvironmentSetupError, match=said):
            pool.judge(items("mark exit 3", "value 1"))
        assert pool._failed_starts == starts


def test_workers_that_are_up_go_on_while_another_cannot_start(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_vcpo.rollout.rewards.pool._STARTS", 1000)
    with make_pool(workers=2, timeout=30.0, marker=str(tmp_path / "lock"), then="sleep 3600") as pool:
        pool_processes(pool, "workers")
        pool._start_timeout = 1.0
        outcomes = pool.judge(items("mark exit 3", "sleep 2.5", *(f"value {i}" for i in range(7))))
        assert [outcome.reward for outcome in outcomes] == [None, 1.0, *range(7)]
        assert pool._failed_starts > 0


def test_a_reward_beyond_fp32_is_no_reward():
    assert checked(1e300).kind == "invalid"
    assert checked(-3.5e38).kind == "invalid"
    assert checked(3e38).reward == 3e38


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"reward": 1.0, "\ud800": 0.0}, r"a part named '\ud800', which is not valid Unicode text"),
        ({"reward": 1.0, "x" * 129: 0.0}, "a part with a name of 129 characters, more than 128"),
        ({"reward": 1.0} | {f"part {i}": 0.0 for i in range(65)}, "gave 65 parts, more than 64"),
        ({"\ud800": 1.0}, "without 'reward'"),
        ({"reward": "\ud800"}, "not a finite number"),
    ],
)
def test_parts_that_no_log_could_hold_are_refused_in_words_that_one_can(result, said):
    outcome = checked(result)
    assert outcome.kind == "invalid"
    assert outcome.error is not None
    assert said in outcome.error
    outcome.error.encode("utf-8")


def test_as_many_parts_as_are_allowed_are_kept():
    parts = {f"{i:0128}": float(i) for i in range(64)}
    assert checked({"reward": 1.0} | parts).parts == parts
