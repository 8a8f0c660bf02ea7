"""sort_digits and reasoning-gym: deterministic prompts, disjoint splits, right rewards."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from megatron_vcpo.environments import EnvironmentSetupError, make_environment, splits
from megatron_vcpo.environments.reasoning_gym_env import ReasoningGym
from megatron_vcpo.environments.sort_digits import SortDigits

CHAIN = {"dataset": "chain_sum", "max_terms": 2, "max_digits": 1}  # a few hundred different tasks


def tasks(environment, key, count: int = 300) -> set[str]:
    return {key(environment.prompt(i)) for i in range(count)}


@pytest.mark.parametrize(
    ("cls", "config", "key"),
    [
        (SortDigits, {"n_digits": 2}, lambda prompt: prompt.metadata["digits"]),
        (ReasoningGym, CHAIN, lambda prompt: prompt.metadata["question"]),
    ],
)
def test_no_task_is_in_both_splits_whatever_the_seeds(cls, config, key):
    train = tasks(cls(split="train", seed=1, **config), key) | tasks(cls(split="train", seed=2, **config), key)
    held_out = tasks(cls(split="eval", seed=1, **config), key) | tasks(cls(split="eval", seed=3, **config), key)
    assert len(train) > 50
    assert len(held_out) > 5
    assert not train & held_out


def test_sorting_is_rewarded_in_full_or_by_place():
    task = SortDigits(split="train", seed=0, n_digits=5)
    prompt = task.prompt(3)
    assert prompt.text == f"sort {prompt.metadata['digits']}: "
    assert prompt.answer == "".join(sorted(prompt.metadata["digits"]))
    assert task.reward(prompt, prompt.answer) == 1.0
    assert task.reward(prompt, f" {prompt.answer}\nsort") == 1.0
    assert task.reward(prompt, prompt.answer[:-1]) == 0.0
    assert task.reward(prompt, "") == 0.0
    partial = SortDigits(split="train", seed=0, n_digits=5, partial_credit=True)
    assert partial.reward(prompt, prompt.answer[:-1] + "x") == 0.8
    assert partial.reward(prompt, prompt.answer + prompt.answer) == 0.5
    assert partial.reward(prompt, "") == 0.0


def test_few_shot_arithmetic_is_a_template_and_a_stop_string():
    task = ReasoningGym(split="train", seed=4, prompt_template="3 + 4 = 7\n{expression} =", stop="\n", **CHAIN)
    prompt = task.prompt(0)
    assert prompt.text == f"3 + 4 = 7\n{prompt.metadata['metadata']['expression']} ="
    assert int(prompt.answer) == eval(prompt.metadata["metadata"]["expression"])
    assert task.reward(prompt, f" {prompt.answer}\n5 + 5 = 10") == 1.0
    assert task.reward(prompt, f" {int(prompt.answer) + 1}\n") < 1.0


def test_answer_that_is_not_in_its_format_gets_nothing():
    task = ReasoningGym(split="train", seed=4, answer_format="tag", **CHAIN)
    prompt = task.prompt(0)
    assert task.reward(prompt, prompt.answer) == 0.0
    assert task.reward(prompt, f"<answer>{prompt.answer}</answer>") == 1.0


def test_answer_that_the_dataset_cannot_parse_is_wrong_not_an_error():
    task = ReasoningGym(dataset="prime_factorization", split="train", seed=0)
    prompt = task.prompt(0)
    assert task.reward(prompt, "nonsense") == 0.0
    assert task.reward(prompt, prompt.answer) == 1.0


def test_judge_that_fails_on_the_right_answer_too_is_an_error(monkeypatch):
    task = ReasoningGym(split="train", seed=0, **CHAIN)

    def broken(answer, entry):
        raise ValueError("broken")

    monkeypatch.setattr(task._dataset, "score_answer", broken)
    with pytest.raises(ValueError, match="broken"):
        task.reward(task.prompt(0), "1")


def test_braces_that_name_no_field_stay_in_the_prompt():
    task = ReasoningGym(split="train", seed=0, prompt_template='{"x": {y}} {question}', **CHAIN)
    assert task.prompt(0).text.startswith('{"x": {y}} State')


def test_template_without_a_field_lists_the_fields():
    task = ReasoningGym(split="train", seed=0, prompt_template="{expresion}", **CHAIN)
    with pytest.raises(EnvironmentSetupError, match=r"\{expression\}"):
        task.prompt(0)


def test_dataset_that_prepares_its_tasks_ahead_still_has_no_end():
    task = ReasoningGym(dataset="list_functions", split="train", seed=0, size=50)
    assert task.prompt(10**6).text


def test_split_without_tasks_is_a_setup_error():
    word = next(word for word in "abcdefgh" if splits.split_of(word) == "train")
    with pytest.raises(EnvironmentSetupError, match="the task has no task in the eval split"):
        splits.first_in_split("eval", lambda attempt: word, lambda task: task, "the task")


@pytest.mark.parametrize(("spec", "config"), [("builtin:sort_digits", {}), ("reasoning_gym:chain_sum", {})])
@pytest.mark.slow
def test_same_index_gives_the_same_prompt_in_another_process(spec, config):
    code = (
        "import pickle, sys; from megatron_vcpo.environments import make_environment; "
        f"e = make_environment({spec!r}, 'train', 9, {config!r}); "
        "sys.stdout.buffer.write(pickle.dumps([e.prompt(i) for i in (0, 7, 10**6)]))"
    )
    other = pickle.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    here = make_environment(spec, "train", 9, config)
    assert other == [here.prompt(i) for i in (0, 7, 10**6)]
