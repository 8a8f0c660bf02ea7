"""Environments by name: what is built, and what a wrong name or configuration says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_vcpo.environments import EnvironmentSetupError, make_environment
from megatron_vcpo.environments.jsonl_math import JsonlMath
from megatron_vcpo.environments.reasoning_gym_env import ReasoningGym
from megatron_vcpo.environments.sort_digits import SortDigits


def test_each_name_builds_its_environment(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    assert isinstance(make_environment("builtin:sort_digits", "train", 0, {}), SortDigits)
    assert isinstance(make_environment("sort_digits", "train", 0, {}), SortDigits)
    assert isinstance(make_environment("reasoning_gym:chain_sum", "train", 0, {}), ReasoningGym)
    assert isinstance(make_environment("jsonl", "train", 0, {}, str(tmp_path / "q.jsonl")), JsonlMath)
    own = make_environment("tests.oracle.faulty_rewards:FaultyRewards", "eval", 0, {})
    assert own.split == "eval"


@pytest.mark.parametrize(
    ("spec", "config", "said"),
    [
        ("jsnl", {}, "no environment 'jsnl'.*Did you mean jsonl"),
        ("sort_digit", {}, "Did you mean sort_digits"),
        ("builtin:sort_digit", {}, "Did you mean builtin:sort_digits"),
        ("reasoning_gym", {}, "there are reasoning_gym:<dataset>"),
        ("reasoning_gym:chainsum", {}, "no dataset 'chainsum'.*did you mean chain_sum"),
        ("reasoning_gym:chain_sum", {"max_term": 2}, "does not accept the configuration.*max_term"),
        ("reasoning_gym:chain_sum", {"seed": 2}, "--rollout-seed"),
        ("reasoning_gym:chain_sum", {"answer_format": "latex"}, "answer_format must be one of raw, first-line"),
        ("reasoning_gym:chain_sum", {"stop": [""]}, "stop must be a string or a list"),
        ("builtin:sort_digits", {"n_digits": 1}, "n_digits .* from 2 to 1000, not 1"),
        ("builtin:sort_digits", {"digits": 3}, "cannot be built from its configuration.*digits"),
        ("builtin:sort_digits", {"prompt_template": "sort: "}, "must contain {digits}"),
        ("no_such_module:Task", {}, "No module 'no_such_module' on the Python path"),
        ("json:JSONDecoderr", {}, "has no 'JSONDecoderr'.*json:JSONDecoder"),
        ("json:JSONDecodeError", {}, "cannot be built from its configuration"),
        ("builtins:dict", {}, "has no method prompt"),
        ("tests.oracle.faulty_rewards:FaultyRewards", {"broken": True}, "^the data is gone"),
    ],
)
def test_what_cannot_be_built_says_why_in_one_sentence(spec, config, said):
    with pytest.raises(EnvironmentSetupError, match=said) as raised:
        make_environment(spec, "train", 0, config)
    assert "\n" not in str(raised.value)


def test_module_that_fails_to_import_is_named_with_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_task.py").write_text("import a_package_it_needs\n")
    (tmp_path / "raising_task.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EnvironmentSetupError, match=r"broken_task:Task cannot be imported.*a_package_it_needs"):
        make_environment("broken_task:Task", "train", 0, {})
    with pytest.raises(EnvironmentSetupError, match="raising_task:Task cannot be imported: RuntimeError: no licence"):
        make_environment("raising_task:Task", "train", 0, {})


def test_prompt_file_is_asked_for_by_the_split_s_flag_and_refused_where_nothing_reads_it():
    with pytest.raises(EnvironmentSetupError, match="--rollout-prompts"):
        make_environment("jsonl", "train", 0, {})
    with pytest.raises(EnvironmentSetupError, match="--rollout-eval-prompts"):
        make_environment("jsonl", "eval", 0, {})
    with pytest.raises(EnvironmentSetupError, match="reads no prompt file"):
        make_environment("builtin:sort_digits", "train", 0, {}, "q.jsonl")


@pytest.mark.slow
def test_environments_import_nothing_heavy():
    heavy = "import sys, megatron_vcpo.rollout.rewards.pool; print(*(m.split('.')[0] for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "megatron", "vllm", "transformers", "sympy", "reasoning_gym"} & set(loaded)
