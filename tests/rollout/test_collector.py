"""One rollout phase over a fake engine: what becomes of prompts, responses and rewards; the layout changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_vcpo.config import RolloutConfig
from megatron_vcpo.engines.protocol import EngineError, GenerationResult
from megatron_vcpo.environments import EnvironmentSetupError, Prompt
from megatron_vcpo.flow.evaluation import evaluate
from megatron_vcpo.rollout.collector import EnginePlace, RolloutCollector, RolloutPhase, judge, response_seed
from megatron_vcpo.rollout.decode import ResponseDecoder
from megatron_vcpo.rollout.rewards.outcome import KINDS, RewardOutcome
from megatron_vcpo.rollout.sampler import DrawnPrompt, PromptSampler
from tests.oracle.fake_engine import CountedCharacters, FakeEngine, InlineRewards
from tests.oracle.tiny_models import EOS, character_tokenizer
from tests.oracle.trajectories import assert_same

CPU = torch.device("cpu")
TOKENIZER = character_tokenizer()


def config(**changes) -> RolloutConfig:
    defaults = {"prompts_per_step": 3, "responses_per_prompt": 4, "max_response_length": 12, "max_prompt_length": 20}
    return RolloutConfig(**defaults | changes)


def collector(*, engine=None, rejected=None, place=None, size=None, **changes) -> RolloutCollector:
    environment = CountedCharacters(size)
    return RolloutCollector(
        engine=engine or FakeEngine(version=7),
        sampler=PromptSampler(environment, TOKENIZER, seed=5, max_length=20, chat=False),
        rewards=InlineRewards(environment, rejected),
        decode=ResponseDecoder(TOKENIZER),
        config=config(**changes),
        place=place or EnginePlace(),
        device=CPU,
    )


def collect(source: RolloutCollector, steps: int) -> RolloutPhase:
    return source.judge(source.generate(steps))


def test_phase_holds_each_step_s_prompts_with_all_their_responses():
    phase = collect(collector(), 2)
    assert phase.rejected == 0
    assert [[(t.group_id, t.index) for t in minibatch] for minibatch in phase.minibatches] == [
        [(group, index) for group in groups for index in range(4)] for groups in ([0, 1, 2], [3, 4, 5])
    ]
    following = collector()
    collect(following, 2)
    assert {t.group_id for t in collect(following, 1).minibatches[0]} == {6, 7, 8}


def test_trajectory_carries_what_the_engine_sampled():
    source = collector()
    trajectories = [t for minibatch in collect(source, 2).minibatches for t in minibatch]
    for trajectory, request in zip(trajectories, source.engine.requests, strict=True):
        result = FakeEngine()._respond(request, source.engine.sampling)
        np.testing.assert_array_equal(trajectory.response_ids, result.response_ids)
        np.testing.assert_array_equal(trajectory.behavior_logprobs, result.logprobs)
        assert trajectory.truncated == result.truncated
        assert trajectory.prompt_ids.tolist() == TOKENIZER.encode(f"{trajectory.prompt_index}:")
        assert trajectory.versions.tolist() == [7] * len(result.response_ids)
        assert trajectory.response_mask.all()
    assert any(t.truncated for t in trajectories)
    assert any(t.response_ids.tolist() == [EOS] for t in trajectories)  # an empty response is one token


def test_reward_sees_the_text_without_the_end_of_text():
    source = collector()
    trajectories = [t for minibatch in collect(source, 2).minibatches for t in minibatch]
    for trajectory, (prompt, text) in zip(trajectories, source.rewards.judged, strict=True):
        assert text == TOKENIZER.decode([t for t in trajectory.response_ids.tolist() if t != EOS])
        assert trajectory.reward == len(text)
        assert trajectory.reward_parts == {"length": float(len(text))}
        assert prompt.answer == trajectory.prompt_index


def test_sampling_is_the_configured_one():
    source = collector(temperature=0.7, stop=["\n", "Q:"], stop_token_ids=[7, 9], max_response_length=9)
    collect(source, 1)
    assert source.engine.sampling.temperature == 0.7
    assert source.engine.sampling.stop == ("\n", "Q:")
    assert source.engine.sampling.stop_token_ids == (7, 9)
    assert source.engine.sampling.max_tokens == 9


def test_failed_rewards_leave_their_trajectories_out_and_are_counted_by_kind(capsys):
    whole = [t for minibatch in collect(collector(), 4).minibatches for t in minibatch]
    last = [TOKENIZER.decode([t for t in w.response_ids.tolist() if t != EOS])[-1:] for w in whole]
    first, second = sorted({c for c in last if c})[:2]
    phase = collect(collector(rejected={first: "timeout", second: "raised"}), 4)
    left = {(t.group_id, t.index) for minibatch in phase.minibatches for t in minibatch}
    assert left == {(t.group_id, t.index) for t, c in zip(whole, last, strict=True) if c not in (first, second)}
    expected = {"raised": last.count(second), "timeout": last.count(first), "died": 0, "invalid": 0}
    assert phase.rejected_by_kind == expected
    assert phase.rejected == last.count(first) + last.count(second)
    assert "it could not be judged" in capsys.readouterr().err


def test_a_phase_explains_one_rejection_of_each_kind_first(capsys):
    samples = [(DrawnPrompt(group_id=9, prompt_index=i, prompt=Prompt(text=""), ids=[]), i) for i in range(40)]

    def lines(*kinds):
        outcomes = [RewardOutcome(reward=None, kind=kind, error=f"it {kind}") for kind in kinds]
        collector()._explain(samples, [*outcomes, RewardOutcome(reward=1.0)])
        return capsys.readouterr().err.replace("megatron_vcpo: rejected group 9 ", "").splitlines()

    assert lines() == []
    assert lines("timeout", "timeout") == [f"response {i} (prompt {i}): it timeout" for i in (0, 1)]
    assert lines(*["raised"] * 20, "died", *["raised"] * 5) == [
        *("response 0 (prompt 0): it raised", "response 20 (prompt 20): it died", "response 1 (prompt 1): it raised"),
        "megatron_vcpo: ... and 23 more in this phase; all together: raised 25, died 1",
    ]
    assert len(lines(*KINDS)) == 4
    assert len(lines(*KINDS * 9)) == 5


@pytest.mark.parametrize("engines", [2, 3, 8])
def test_number_of_engines_changes_no_trajectory(engines):
    alone = [t for minibatch in collect(collector(), 2).minibatches for t in minibatch]
    apart = []
    for index in range(engines):
        place = EnginePlace(index=index, count=engines)
        apart += [t for minibatch in collect(collector(place=place), 2).minibatches for t in minibatch]
    assert len(apart) == len(alone)
    for first, second in zip(alone, apart, strict=True):
        assert_same(first, second)


def test_ranks_of_one_engine_ask_for_the_same_and_one_hands_it_over():
    places = [EnginePlace.of(rank, world_size=4, engine_size=2) for rank in range(4)]
    assert [(p.index, p.count, p.leader) for p in places] == [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]
    helper = collector(place=places[1])
    helper.rewards = None
    assert collect(helper, 1).minibatches == [[]]
    leader = collector(place=places[0])
    collect(leader, 1)
    assert helper.engine.requests == leader.engine.requests


def test_seed_of_a_response_depends_on_its_place_alone_and_on_all_of_it():
    seeds = {response_seed(s, g, i) for s in (0, 1) for g in range(50) for i in range(20)}
    assert len(seeds) == 2 * 50 * 20
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert response_seed(1, 2, 3) == response_seed(1, 2, 3)


def test_failure_of_the_engine_ends_the_phase():
    class Broken(FakeEngine):
        def generate(self, requests, sampling, *, progress):
            raise EngineError("it broke")

    with pytest.raises(EngineError, match="it broke"):
        collect(collector(engine=Broken()), 1)


def evaluation(engine, *, size=None, rejected=None, long=frozenset(), **changes):
    environment = CountedCharacters(size, long)
    return evaluate(
        engine=engine,
        environment=environment,
        rewards=InlineRewards(environment, rejected),
        tokenizer=TOKENIZER,
        decode=ResponseDecoder(TOKENIZER),
        config=config(**{"eval_num_prompts": 6} | changes),
        seed=1,
        place=EnginePlace(),
        device=CPU,
    )


def test_evaluation_is_the_mean_over_the_same_prompts_and_seeds_each_time():
    engine = FakeEngine()
    first = evaluation(engine, eval_samples=3, eval_temperature=0.5)
    assert first.responses == 18
    assert engine.sampling.temperature == 0.5
    assert len({request.seed for request in engine.requests}) == 18
    results = [engine._respond(request, engine.sampling) for request in engine.requests]
    assert first.length == pytest.approx(np.mean([len(result.response_ids) for result in results]))
    assert first.reward == pytest.approx(np.mean([(result.response_ids != EOS).sum() for result in results]))
    assert evaluation(FakeEngine(), eval_samples=3, eval_temperature=0.5) == first


def test_evaluation_is_greedy_unless_told_otherwise_and_takes_no_prompt_twice():
    engine = FakeEngine()
    assert evaluation(engine, size=4).responses == 4
    assert engine.sampling.temperature == 0.0


def test_evaluation_ends_responses_where_training_does():
    engine = FakeEngine()
    evaluation(engine, size=4, stop=["x"], stop_token_ids=[7, 9])
    assert (engine.sampling.stop, engine.sampling.stop_token_ids) == (("x",), (7, 9))


def test_evaluation_counts_what_it_leaves_out():
    result = evaluation(FakeEngine(), long=frozenset({0, 3}))
    assert (result.responses, result.rejected) == (4, 2)
    nothing = evaluation(FakeEngine(), long=frozenset(range(6)))
    assert (nothing.responses, nothing.rejected) == (0, 6)
    assert np.isnan(nothing.reward)


class Moving(FakeEngine):
    """Its weights change amid each response."""

    def _respond(self, request, sampling):
        result = super()._respond(request, sampling)
        return replace(result, versions=np.arange(len(result.response_ids), dtype=np.int32))


def test_every_token_keeps_the_version_that_its_engine_gave_it():
    for t in collect(collector(engine=Moving(version=50)), 1).trajectories:
        assert t.versions.tolist() == list(range(len(t.response_ids)))


def test_tags_that_are_special_tokens_reach_the_judge():
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    ids = np.array([*tokenizer.encode("<answer>2</answer>"), EOS], np.int32)
    result = GenerationResult(
        response_ids=ids, logprobs=np.zeros(4, np.float32), versions=np.zeros(4, np.int32), text="", truncated=False
    )
    rewards = InlineRewards(CountedCharacters())
    judge(rewards, [Prompt(text="1+1")], [result], ResponseDecoder(tokenizer))
    assert rewards.judged == [(Prompt(text="1+1"), "<answer>2</answer>")]


def test_the_judge_is_told_what_the_chat_template_made_of_a_prompt():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    source = collector()
    source.sampler = PromptSampler(source.sampler.environment, tokenizer, seed=5, max_length=20, chat=True)
    collect(source, 1)
    assert [p.rendered for p, _ in source.rewards.judged] == [f"{i}:<think>" for i in range(3) for _ in range(4)]
    evaluated = InlineRewards(source.sampler.environment)
    evaluate(
        engine=FakeEngine(version=7),
        environment=evaluated.environment,
        rewards=evaluated,
        tokenizer=tokenizer,
        decode=ResponseDecoder(tokenizer),
        config=config(chat_template=True, eval_num_prompts=2),
        seed=1,
        place=EnginePlace(),
        device=CPU,
    )
    assert [p.rendered for p, _ in evaluated.judged] == ["0:<think>", "1:<think>"]


def test_a_held_out_prompt_that_no_tokenizer_takes_is_named():
    class Odd(CountedCharacters):
        def prompt(self, index):
            return Prompt(text="1\ud800") if index == 1 else super().prompt(index)

    with pytest.raises(EnvironmentSetupError, match=r"prompt\(1\) of the environment Odd holds a lone surrogate"):
        evaluate(
            engine=FakeEngine(),
            environment=Odd(),
            rewards=None,
            tokenizer=TOKENIZER,
            decode=ResponseDecoder(TOKENIZER),
            config=config(eval_num_prompts=2),
            seed=1,
            place=EnginePlace(),
            device=CPU,
        )
