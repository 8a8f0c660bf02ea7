"""The real engine in a process of its own: what it computes, and what the trainer is told when one of them fails.

The tests share one child and run in this order; the last ones end it.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_vcpo.data.digests import digest
from megatron_vcpo.engines.process import ProcessEngine, _limit_blocking
from megatron_vcpo.engines.protocol import EngineError, GenerationRequest, Sampling
from megatron_vcpo.engines.vllm.engine import VLLMSettings
from tests.oracle import tiny_models

pytestmark = pytest.mark.engine

PROMPT = [20, 14, 21, 32]
REQUESTS = [GenerationRequest(prompt_ids=PROMPT, seed=seed) for seed in range(3)]


class Weights:
    def __init__(self, folder: Any) -> None:
        self.folder = folder
        for seed in (0, 1):
            tiny_models.save("llama", seed, folder / str(seed))
        self.tensors = [load_file(folder / str(seed) / "model.safetensors") for seed in (0, 1)]
        self.models = [tiny_models.load(folder / str(seed)) for seed in (0, 1)]
        self.names = list(self.tensors[0])

    def stream(self, which: int, **at: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Through one piece of memory; `at` is (number, function) of what happens before a tensor is sent."""
        memory = torch.empty(max(tensor.numel() for tensor in self.tensors[which].values()))
        for number, (name, tensor) in enumerate(self.tensors[which].items()):
            if at and number == at["number"]:
                at["happens"]()
            yield name, memory[: tensor.numel()].view(tensor.shape).copy_(tensor)
            memory.fill_(123.0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Weights:
    return Weights(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(weights) -> Iterator[ProcessEngine]:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "3", "8"  # as under torchrun: not the child's business
    try:
        engine = ProcessEngine(
            VLLMSettings(
                model_dir=str(weights.folder / "0"), dtype="float32", max_model_len=128, kv_cache_bytes=64 << 20
            ),
            rank=3,
            timeout=5.0,
            bucket_bytes=1 << 15,
        )
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    yield engine
    engine.shutdown()
    engine.shutdown()


def difference(engine: ProcessEngine, model: Any) -> float:
    results = engine.generate(REQUESTS, Sampling(max_tokens=24), progress=False)
    return max(
        np.abs(r.logprobs - tiny_models.logprobs(model, PROMPT + r.response_ids.tolist(), len(PROMPT))).max()
        for r in results
    )


def test_it_refuses_to_generate_before_the_first_weights(engine) -> None:
    with pytest.raises(EngineError, match=r"engine process \d+ of rank 3 has no complete set"):
        engine.generate(REQUESTS, Sampling(max_tokens=4), progress=False)


def test_every_update_gives_the_logprobs_of_transformers_and_one_message_a_bucket(engine, weights) -> None:
    total = sum(tensor.nbytes for tensor in weights.tensors[0].values())
    for version in range(4):
        report = engine.update_weights(weights.stream(version % 2), version)
        assert engine.version == version
        assert report.copied == (len(weights.names) if version else 0)
        assert total / (1 << 15) < engine._sender.buckets < len(weights.names)
        assert difference(engine, weights.models[version % 2]) < 1e-4
    scores = engine.score([[*PROMPT, 9, 10]], [4])
    np.testing.assert_allclose(scores[0], tiny_models.logprobs(weights.models[1], [*PROMPT, 9, 10], 4), atol=1e-4)


def test_stop_tokens_reach_the_engine_in_the_other_process(engine, weights) -> None:
    engine.update_weights(weights.stream(0), 3)
    free = engine.generate(REQUESTS, Sampling(max_tokens=24), progress=False)[0]
    ids = free.response_ids.tolist()
    assert len(ids) > 2
    stop = Sampling(max_tokens=24, stop_token_ids=(ids[1],))
    ended = engine.generate(REQUESTS, stop, progress=False)[0]
    assert ended.response_ids.tolist() == ids[: ids.index(ids[1]) + 1]
    assert not ended.truncated


def test_digests_of_a_verified_update_are_those_of_what_was_sent(engine, weights) -> None:
    report = engine.update_weights(weights.stream(0), 4, verify=True)
    assert report.received == {name: digest(tensor) for name, tensor in weights.tensors[0].items()}


def test_three_hundred_updates_leave_the_memory_of_both_processes_where_it_was(engine, weights) -> None:
    resident = []
    for version in range(10, 310):
        engine.update_weights(weights.stream(version % 2), version)
        if version % 100 == 9:  # not the first ones, which are recorded and proven
            gc.collect()
            resident.append([_resident_bytes(os.getpid()), _resident_bytes(engine._process.pid)])
    assert max(last - first for first, last in zip(resident[0], resident[-1], strict=True)) < 4e6, resident
    assert difference(engine, weights.models[1]) < 1e-4


@pytest.mark.parametrize("number", [0, 7, 20])
def test_a_trainer_that_fails_gets_its_own_error_back_and_the_next_update_heals(number, engine, weights) -> None:
    def breaks() -> None:
        raise RuntimeError("the gather broke")

    with pytest.raises(RuntimeError, match="the gather broke"):
        engine.update_weights(weights.stream(1, number=number, happens=breaks), 5)
    assert engine.version is None
    with pytest.raises(EngineError, match="no complete set"):
        engine.generate(REQUESTS, Sampling(max_tokens=4), progress=False)
    engine.update_weights(weights.stream(0), 6)
    assert difference(engine, weights.models[0]) < 1e-4


def test_an_engine_that_fails_says_at_which_tensor_and_the_next_update_heals(engine, weights) -> None:
    misshapen = [(n, t[:3] if n == "model.layers.0.mlp.up_proj.weight" else t) for n, t in weights.tensors[1].items()]
    with pytest.raises(EngineError, match=r"In the engine process \d+ of rank 3: .*layers\.0\.mlp\.up_proj"):
        engine.update_weights(iter(misshapen), 7)
    assert engine.version is None
    engine.update_weights(weights.stream(1), 8)
    assert difference(engine, weights.models[1]) < 1e-4


def test_a_publication_that_the_trainer_calls_wrong_is_not_served(engine) -> None:
    engine.version = None  # as the synchronizer does on another rank's failure
    with pytest.raises(EngineError, match="no complete set"):
        engine.score([[5, 6, 7]], [1])


def test_a_stuck_process_is_ended_at_the_deadline_and_named(engine, weights) -> None:
    stops = {"number": 9, "happens": lambda: os.kill(engine._process.pid, signal.SIGSTOP)}
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"Rank 3 waited 5 seconds for the engine process \d+ .*last tensor given: "):
        engine.update_weights(weights.stream(0, **stops), 9)
    assert time.monotonic() - started < 50  # the deadline is of 5 seconds, and the machine may be busy
    assert engine._process.poll() == -signal.SIGKILL
    with pytest.raises(EngineError, match="no complete set"):
        engine.generate(REQUESTS, Sampling(max_tokens=4), progress=False)
    with pytest.raises(EngineError, match=r"is gone \(exit code -9\)"):
        engine.update_weights(weights.stream(0), 10)


def test_a_long_generation_goes_on_and_a_stopped_process_is_ended_and_named(weights) -> None:
    engine = ProcessEngine(
        VLLMSettings(model_dir=str(weights.folder / "0"), dtype="float32", max_model_len=128, kv_cache_bytes=64 << 20),
        rank=2,
        timeout=60.0,
        bucket_bytes=1 << 15,
    )
    engine.update_weights(weights.stream(0), 0)
    engine._timeout = 1.0
    requests = [GenerationRequest(prompt_ids=PROMPT, seed=seed) for seed in range(400)]
    started = time.monotonic()
    assert len(engine.generate(requests, Sampling(max_tokens=120), progress=False)) == len(requests)
    whole = time.monotonic() - started
    assert whole > 1.0, "too short to show anything"
    threading.Timer(whole / 4, os.kill, (engine._process.pid, signal.SIGSTOP)).start()
    started = time.monotonic()
    with pytest.raises(
        EngineError, match=r"The engine process \d+ of rank 2 gave no sign of life for 1 seconds .*to gen"
    ):
        engine.generate(requests, Sampling(max_tokens=120), progress=False)
    assert time.monotonic() - started < whole + 50.0
    assert engine._process.poll() == -signal.SIGKILL
    engine.shutdown()


def test_a_request_that_does_not_fit_the_pipe_of_a_stopped_process_does_not_hang() -> None:
    mine, theirs = Pipe()
    _limit_blocking(mine, 0.5)
    with pytest.raises(BlockingIOError):
        mine.send(bytes(1 << 22))
    theirs.close()
    mine.close()


def test_an_answer_that_stops_half_way_does_not_hang() -> None:
    mine, theirs = Pipe()
    _limit_blocking(mine, 0.5)
    os.write(theirs.fileno(), (1000).to_bytes(4, "big") + b"begun")
    assert mine.poll(1.0)
    with pytest.raises(BlockingIOError):
        mine.recv()
    theirs.close()
    mine.close()


OWNER = """
import time
from multiprocessing import Pipe
from megatron_vcpo.engines.process import _spawn
from megatron_vcpo.engines.pulse import Pulse
mine, theirs = Pipe()
pulse = Pulse()
child = _spawn(theirs, pulse, 0)
while pulse.beats == 0:
    time.sleep(0.05)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_stopped_process_ends_with_its_trainer() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    os.kill(child, signal.SIGSTOP)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    end = time.monotonic() + 60.0
    while "engines.process" in _command(child) and time.monotonic() < end:  # a zombie has no command line
        time.sleep(0.05)
    left = "engines.process" in _command(child)
    if left:
        os.kill(child, signal.SIGKILL)
    assert not left


def test_a_process_that_is_killed_amid_an_update_is_noticed_at_once(weights) -> None:
    engine = ProcessEngine(
        VLLMSettings(model_dir=str(weights.folder / "0"), dtype="float32", max_model_len=128, kv_cache_bytes=64 << 20),
        rank=0,
        timeout=60.0,
        bucket_bytes=1 << 15,
    )
    engine.update_weights(weights.stream(0), 0)
    kill = {"number": 12, "happens": lambda: os.kill(engine._process.pid, signal.SIGKILL)}
    started = time.monotonic()
    # The twelfth, or one of the next: what is sent while the process dies is lost with it.
    last = "|".join(re.escape(name) for name in weights.names[11:])
    with pytest.raises(EngineError, match=rf"gone \(exit code -9\); .*last tensor given: ({last})\)"):
        engine.update_weights(weights.stream(1, **kill), 1)
    assert time.monotonic() - started < 50  # the deadline is of 60 seconds
    assert engine.version is None
    engine.shutdown()


@pytest.mark.parametrize(
    ("has_model", "length", "said"),
    [(False, 8, r"has no config\.json"), (True, 513, r"513.* What it logged is in {log}\.")],
)
def test_an_engine_that_cannot_start_says_why_and_leaves_no_process(
    weights, tmp_path, capfd, has_model, length, said
) -> None:
    log = tmp_path / "engine_rank1.log"
    before = _engine_processes()  # another test's may run
    folder = weights.folder / "0" if has_model else tmp_path
    said = said.format(log=log)
    with pytest.raises(EngineError, match=rf"In the engine process \d+ of rank 1: .*{said}"):
        ProcessEngine(
            VLLMSettings(model_dir=str(folder), dtype="float32", max_model_len=length, log_file=str(log)),
            rank=1,
            timeout=5.0,
            bucket_bytes=1 << 20,
        )
    assert log.exists() == has_model
    assert "Traceback" not in "".join(capfd.readouterr())
    assert _engine_processes() <= before


def _engine_processes() -> set[int]:
    children = [int(p) for p in os.listdir("/proc") if p.isdigit() and _parent(p) == os.getpid()]
    return {c for c in children if "engines.process" in _command(c)}


def _resident_bytes(process: int) -> int:
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _parent(process: str) -> int:
    try:
        with open(f"/proc/{process}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _command(process: int) -> str:
    try:
        with open(f"/proc/{process}/cmdline") as file:
            return file.read()
    except OSError:
        return ""
