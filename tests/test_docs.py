"""The documents: the flags are all in them, their code runs, and their links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vcpo.config import RolloutConfig, SyncConfig, VCPOConfig
from megatron_vcpo.environments import make_environment
from megatron_vcpo.flow.journal import _RENAMED
from megatron_vcpo.flow.loop import _COUNTED
from megatron_vcpo.objective import AdvantageInputs, LossInputs, load_advantages, load_loss, vcpo_loss

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FLAGS = {
    f"--{prefix}-{field.name.replace('_', '-')}"
    for prefix, group in (("vcpo", VCPOConfig), ("rollout", RolloutConfig), ("sync", SyncConfig))
    for field in dataclasses.fields(group)
}


def blocks(document: str, language: str) -> list[str]:
    text = (REPOSITORY / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The code blocks of extending.md that begin with a file name, as files on the Python path."""
    for block in blocks("docs/extending.md", "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / name[1]).write_text(block)
            monkeypatch.delitem(sys.modules, name[1].removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return tmp_path


def test_flags_md_is_what_the_dataclasses_say() -> None:
    tool = importlib.import_module("tools.write_flags")
    assert (REPOSITORY / "docs" / "flags.md").read_text() == tool.text(), "run tools/write_flags.py"
    assert set(re.findall(r"^\| `(--[\w-]+)`", tool.text(), re.MULTILINE)) == FLAGS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_no_flag_that_does_not_exist(document: Path) -> None:
    named = set(re.findall(r"--(?:vcpo|rollout|sync)-[a-z-]*[a-z]", document.read_text()))
    assert named <= FLAGS, named - FLAGS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(document: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_the_environment_of_the_documentation_works(written: Path) -> None:
    words = ["stale", "fresh", "late", "soon"]
    train = make_environment("my_task:Reverse", split="train", seed=0, config={"words": words})
    held_out = make_environment("my_task:Reverse", split="eval", seed=0, config={"words": words})
    prompt = train.prompt(0)
    assert (prompt.text, prompt.answer) == ("stale backwards: ", "elats")
    assert train.reward(prompt, " elats\n") == {"reward": 1.0, "exact": 1.0, "length": 1.0}
    assert train.reward(prompt, "stale") == {"reward": 0.0, "exact": 0.0, "length": 1.0}
    assert not {train.prompt(i).text for i in range(4)} & {held_out.prompt(i).text for i in range(4)}

    odd = {"words": ["one", "two", "three"]}
    splits = [make_environment("my_task:Reverse", split=split, seed=0, config=odd) for split in ("train", "eval")]
    train_texts, held_out_texts = ({split.prompt(i).text for i in range(9)} for split in splits)
    assert (len(train_texts), len(held_out_texts)) == (2, 1)
    assert not train_texts & held_out_texts


def loss_inputs(policy: torch.Tensor, **changes: Any) -> LossInputs:
    """Two trajectories of one group, of one and two response tokens."""
    defaults: dict[str, Any] = {
        "policy_logprobs": policy,
        "behavior_logprobs": policy.detach(),
        "mask": torch.tensor([False, True, True, True, False]),
        "cu_seqlens": torch.tensor([0, 2, 4]),  # the last position is padding
        "rewards": torch.tensor([1.0, 0.5]),
        "group_ids": torch.tensor([0, 0]),
        "advantage_scales": torch.ones(2),
        "num_trajectories": 2.0,
        "num_tokens": 3.0,
        "max_response_length": 4,
        "config": VCPOConfig(),
    }
    return LossInputs(**defaults | changes)


def test_the_loss_of_the_documentation_works(written: Path) -> None:
    policy = torch.tensor([-1.0, -2.0, -3.0, -4.0, -9.0], requires_grad=True)
    outputs = load_loss("my_loss:reinforce")(loss_inputs(policy))
    outputs.loss.backward()
    assert float(outputs.loss) == pytest.approx((2.0 + 0.5 * 3.0 + 0.5 * 4.0) / 3)
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, -1 / 3, -0.5 / 3, -0.5 / 3, 0.0])
    assert outputs.metrics["pg_loss"].tolist() == pytest.approx([5.5, 3.0])


def test_the_loss_with_baselines_does_not_depend_on_where_a_group_is_cut(written: Path) -> None:
    loss = load_loss("my_advantages:with_baselines")
    policy = torch.tensor([-1.0, -2.0, -3.0, -4.0, -9.0], requires_grad=True)
    given = {"baselines": torch.tensor([0.75, 0.75]).double(), "advantage_scales": torch.tensor([4.0, 4.0])}
    whole = loss(loss_inputs(policy, **given))
    assert whole.loss.dtype == torch.float32
    assert float(whole.loss) == pytest.approx((2.0 - 3.0 - 4.0) / 3)
    parts = [
        loss(
            loss_inputs(
                policy[2 * i : 2 * i + 2],
                mask=torch.tensor([i == 1, True]),
                cu_seqlens=torch.tensor([0, 2]),
                **{name: getattr(loss_inputs(policy), name)[[i]] for name in ("rewards", "group_ids")},
                **{name: values[[i]] for name, values in given.items()},
            )
        )
        for i in range(2)
    ]
    assert float(parts[0].loss + parts[1].loss) == pytest.approx(float(whole.loss))
    with pytest.raises(AssertionError, match="use --vcpo-baseline mean"):
        loss(loss_inputs(policy))


def test_the_advantages_of_the_documentation_are_ranks_within_a_group(written: Path) -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([3.0, 1.0, 2.0, 5.0, 5.0, 9.0]).double(),
        group_ids=torch.tensor([4, 4, 4, -1, -1, 8]),
        lengths=torch.ones(6, dtype=torch.int64),
        config=VCPOConfig(),
    )
    function = load_advantages("my_ranks:by_rank")
    assert function is not None
    assert function(inputs).tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


def test_every_metric_is_explained() -> None:
    policy = torch.full((5,), -1.0)
    from_loss = vcpo_loss(loss_inputs(policy, token_energies=torch.ones(5))).metrics
    written = {_RENAMED.get(name, name) for name in from_loss}
    sources = [path for room in ("flow", "mcore") for path in (REPOSITORY / "megatron_vcpo" / room).rglob("*.py")]
    for path in sources:
        text = path.read_text()
        written |= {f"count/{name}" for name in re.findall(r'\.count\(f?"([^"]+)"', text)}
        written |= {f"count/{name}" for name in re.findall(r'\.counters\["(\w+)"\] =', text)}
        written |= {f"time/{name}" for name in re.findall(r'\.timer\("(\w+)"', text)}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name in (
                "finalize",
                "end",
                "record",
                "step_record",
                "metrics",
                "route_metrics",
            ):
                written |= set(string_keys(node))
    written |= {f"count/{name}" for name in _COUNTED}
    written |= {"reward/{}", "time/generate", "time/reward"}
    written |= {f"mismatch_{kind}_{name}" for kind in ("abs", "kl") for name in ("replay", "no_replay")}
    cells = re.findall(
        r"^\| (`[^|]*`) \|", (REPOSITORY / "docs/metrics.md").read_text().split("## Every step")[1], re.MULTILINE
    )
    explained = {re.sub(r"<\w+>", "{}", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    written = {re.sub(r"\{[^}]*\}", "{}", name) for name in written}
    assert written - explained == set()
    assert explained - written == set()


def string_keys(function: ast.FunctionDef) -> Iterator[str]:
    """Keys of the dicts in a function, with {} for what is put into an f-string."""
    for node in ast.walk(function):
        keys = [node.key] if isinstance(node, ast.DictComp) else node.keys if isinstance(node, ast.Dict) else []
        for key in keys:
            if isinstance(key, ast.Constant):
                yield str(key.value)
            elif isinstance(key, ast.JoinedStr) and not ast.unparse(key).startswith(("f'count/", "f'time/")):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in key.values)


def test_the_loop_of_the_documentation_is_that_of_register() -> None:
    import megatron_vcpo

    (loop,) = (block for block in blocks("docs/extending.md", "python") if "register(" in block)
    example = re.findall(r"(?:>>>|\.\.\.) ?(.*)", megatron_vcpo.register.__doc__ or "")
    assert " ".join("\n".join(example).split()) == " ".join(loop.split())
