"""Run by test_rollout_exchange.py under torchrun over gloo, three processes: trajectories travel, phases agree."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_vcpo.config import RolloutConfig
from megatron_vcpo.data import exchange
from megatron_vcpo.data.exchange import exchange_trajectories
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.engines.protocol import EngineError
from megatron_vcpo.flow.evaluation import Evaluation, evaluate
from megatron_vcpo.rollout.collector import EnginePlace, RolloutCollector
from megatron_vcpo.rollout.decode import ResponseDecoder
from megatron_vcpo.rollout.sampler import PromptSampler
from tests.oracle.fake_engine import CountedCharacters, FakeEngine, InlineRewards
from tests.oracle.tiny_models import character_tokenizer
from tests.oracle.trajectories import assert_same, trajectory

CPU = torch.device("cpu")
CONFIG = RolloutConfig(
    prompts_per_step=4, responses_per_prompt=3, max_response_length=12, max_prompt_length=20, eval_num_prompts=7
)


def scattered(count: int) -> list[Trajectory]:
    """Groups that span ranks, lengths that differ, one response empty."""
    random = np.random.default_rng(0)
    made = []
    for number in range(count):
        length = number % 5
        made.append(
            trajectory(
                group_id=number // 4,
                index=number % 4,
                prompt_ids=random.integers(0, 99, 1 + number % 3).astype(np.int32),
                response_ids=random.integers(0, 99, length).astype(np.int32),
                behavior_logprobs=-random.random(length).astype(np.float32),
                versions=np.full(length, number, np.int32),
                response_mask=random.random(length) < 0.5,
                reward=float(random.standard_normal()),
                reward_parts={"größe": float(number)},
                truncated=number % 2 == 0,
            )
        )
    return made


def check_exchange(rank: int, world: int) -> None:
    for piece in (exchange._PIECE_BYTES, 7):
        exchange._PIECE_BYTES = piece
        check_shares(rank, world)
    check_volume(rank, world)


def check_volume(rank: int, world: int) -> None:
    """What one rank has travels once; it is not padded, and no rank asks for the others' share of nothing."""
    exchange._PIECE_BYTES = 1 << 16
    length, sent = 100_000, []
    broadcast, all_gather = dist.broadcast, dist.all_gather
    dist.broadcast = lambda tensor, *args, **kwargs: (sent.append(tensor), broadcast(tensor, *args, **kwargs))
    dist.all_gather = lambda out, tensor, **kwargs: (sent.extend(out), all_gather(out, tensor, **kwargs))
    routes = np.arange(length + 3, dtype=np.int64)[:, None, None].astype(np.uint8)
    own = trajectory(
        response_ids=np.arange(length, dtype=np.int32),
        behavior_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        response_mask=np.ones(length, np.bool_),
        prompt_ids=np.arange(3, dtype=np.int32),
        routed_experts=np.repeat(routes, 16, axis=2),
    )
    try:
        (come,) = exchange_trajectories([own] if rank == 1 else [], device=CPU)
    finally:
        dist.broadcast, dist.all_gather = broadcast, all_gather
    assert_same(come, own)
    volume = sum(tensor.nbytes for tensor in sent)
    assert length * 29 < volume < length * 29 + 4096, volume
    assert max(tensor.nbytes for tensor in sent) == 1 << 16


def check_shares(rank: int, world: int) -> None:
    everything = scattered(22)
    shares: list[Callable[[int], bool]] = [
        lambda number: number % world == rank,
        lambda number: rank == 1,  # the others have none
        lambda number: number * world // 22 == world - 1 - rank,
    ]
    for share in shares:
        together = exchange_trajectories([t for n, t in enumerate(everything) if share(n)], device=CPU)
        assert len(together) == len(everything)
        for ours, theirs in zip(everything, together, strict=True):
            assert_same(ours, theirs)
    assert exchange_trajectories([], device=CPU) == []
    with pytest.raises(ValueError, match="group 0 response 0 was handed in twice"):
        exchange_trajectories(everything[:1] if rank < 2 else [], device=CPU)


def phase(engine: FakeEngine, place: EnginePlace) -> tuple[list[list[Trajectory]], int, dict[str, int], Evaluation]:
    environment = CountedCharacters()
    rewards = InlineRewards(
        environment,
        dict.fromkeys("abcd", "timeout")
        | dict.fromkeys("efgh", "raised")
        | dict.fromkeys("ijkl", "died")
        | dict.fromkeys("mn", "invalid"),
    )
    tokenizer = character_tokenizer()
    collector = RolloutCollector(
        engine=engine,
        sampler=PromptSampler(environment, tokenizer, seed=1, max_length=20, chat=False),
        rewards=rewards if place.leader else None,
        decode=ResponseDecoder(tokenizer),
        config=CONFIG,
        place=place,
        device=CPU,
    )
    made = collector.judge(collector.generate(8))
    result = evaluate(
        engine=engine,
        environment=environment,
        rewards=rewards if place.leader else None,
        tokenizer=tokenizer,
        decode=ResponseDecoder(tokenizer),
        config=CONFIG,
        seed=1,
        place=place,
        device=CPU,
    )
    return made.minibatches, made.rejected, made.rejected_by_kind, result


def check_phases(rank: int, world: int, folder: Path) -> None:
    """One engine a rank, and one engine over all ranks, against one process."""
    alone = pickle.loads((folder / "alone.pickle").read_bytes())
    for size in (1, world):
        made = phase(FakeEngine(version=2), EnginePlace.of(rank, world, size))
        assert made[1:] == alone[1:], (made[1:], alone[1:])
        for ours, theirs in zip(made[0], alone[0], strict=True):
            for first, second in zip(ours, theirs, strict=True):
                assert_same(first, second)


def check_failure(rank: int, world: int) -> None:
    """An engine that fails on one rank fails everywhere, and the next collective still matches."""

    class Broken(FakeEngine):
        def generate(self, requests, sampling, *, progress):
            raise EngineError("it broke")

    with pytest.raises(EngineError, match="it broke"):
        phase(Broken() if rank == 1 else FakeEngine(), EnginePlace.of(rank, world, 1))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    check_exchange(rank, world)
    check_phases(rank, world, folder)
    check_failure(rank, world)
    dist.barrier()
    if rank == 0:
        print("rollouts agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
