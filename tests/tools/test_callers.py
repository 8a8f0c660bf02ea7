"""The files of tools/ that only call a command of the package."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
COMMANDS = sorted(path.stem for path in (REPOSITORY / "megatron_vcpo" / "commands").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"train", "supervised"}))
def test_run_by_its_path_a_tool_is_the_command_of_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    command = importlib.import_module(f"megatron_vcpo.commands.{name}")
    monkeypatch.setattr(command, "main", lambda: given.append(sys.path[0]) or 3)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != REPOSITORY])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPOSITORY / "tools" / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 3
    assert given == [str(REPOSITORY)]
