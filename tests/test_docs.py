"""The documents: the flags are all in them, their code runs, and their links lead somewhere."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_vcpo.config import RolloutConfig, SyncConfig, VCPOConfig
from megatron_vcpo.environments import make_environment
from megatron_vcpo.objective import LossInputs, load_loss

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
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


def test_the_loss_of_the_documentation_works(written: Path) -> None:
    policy = torch.tensor([-1.0, -2.0, -3.0, -4.0, -9.0], requires_grad=True)
    inputs = LossInputs(
        policy_logprobs=policy,
        behavior_logprobs=policy.detach(),
        mask=torch.tensor([False, True, True, True, False]),
        cu_seqlens=torch.tensor([0, 2, 4]),  # the last position is padding
        rewards=torch.tensor([1.0, 0.5]),
        group_ids=torch.tensor([0, 0]),
        advantage_scales=torch.ones(2),
        num_trajectories=2.0,
        num_tokens=3.0,
        max_response_length=4,
        config=VCPOConfig(),
    )
    outputs = load_loss("my_loss:reinforce")(inputs)
    outputs.loss.backward()
    assert float(outputs.loss) == pytest.approx((2.0 + 0.5 * 3.0 + 0.5 * 4.0) / 3)
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, -1 / 3, -0.5 / 3, -0.5 / 3, 0.0])
    assert outputs.metrics["pg_loss"].tolist() == pytest.approx([5.5, 3.0])


def test_the_loop_of_the_documentation_is_that_of_register() -> None:
    import megatron_vcpo

    (loop,) = (block for block in blocks("docs/extending.md", "python") if "register(" in block)
    example = re.findall(r"(?:>>>|\.\.\.) ?(.*)", megatron_vcpo.register.__doc__ or "")
    assert " ".join("\n".join(example).split()) == " ".join(loop.split())
