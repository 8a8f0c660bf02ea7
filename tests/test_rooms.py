"""The rooms of the package import each other in one direction, as docs/architecture.md says."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "megatron_vcpo"
TOP = "."


def sources() -> dict[str, Path]:
    """Dotted name within the package -> file."""
    paths = {path.relative_to(PACKAGE): path for path in PACKAGE.rglob("*.py")}
    paths |= {Path("patches") / path.name: path for path in (PACKAGE / "patches").glob("*.py")}  # behind a link
    return {".".join(name.with_suffix("").parts).removesuffix(".__init__"): path for name, path in paths.items()}


SOURCES = sources()


def room_of(module: str) -> str:
    """The folder a module lies in, relative to the package."""
    inner = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    return TOP if inner in ("", "__init__") else inner.replace(".", "/")


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megatron_vcpo."):
            module = node.module.removeprefix("megatron_vcpo.")
            for alias in node.names:
                full = f"{module}.{alias.name}"
                found.add(full if full in SOURCES else module)
        elif isinstance(node, ast.ImportFrom) and node.module == "megatron_vcpo":
            found |= {alias.name for alias in node.names if alias.name in SOURCES}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("megatron_vcpo.") for alias in node.names} & set(SOURCES)
    return found


def arrows() -> dict[str, set[str]]:
    """Room -> rooms that its modules import."""
    found: dict[str, set[str]] = {}
    for module, path in SOURCES.items():
        room = room_of(module)
        found.setdefault(room, set()).update({room_of(other) for other in imported(path)} - {room})
    return found


def documented() -> dict[str, set[str]]:
    """The same, from the table."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text().split("## The rooms")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+)/` \|.*\|([^|]*)\|$", text, re.MULTILINE)
    return {room: set(re.findall(r"`([^`]+)`", rooms)) for room, rooms in rows}


def test_imports_are_those_of_the_documented_rooms() -> None:
    found = {room: rooms for room, rooms in arrows().items() if room != TOP and any_module(room)}
    assert found == documented()
    assert not [room for room, rooms in found.items() if TOP in rooms], "a room imports a module above it"


def any_module(room: str) -> bool:
    """Whether a folder holds more than folders."""
    return any(room_of(module) == room and path.name != "__init__.py" for module, path in SOURCES.items())


def test_no_room_is_imported_by_one_that_it_imports() -> None:
    left = arrows()
    while left:
        free = [room for room, rooms in left.items() if not rooms & set(left)]
        assert free, f"these import each other in a circle: {left}"
        left = {room: rooms for room, rooms in left.items() if room not in free}


def test_no_two_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for path in SOURCES.values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_has_more_than_500_lines() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in SOURCES.items()}
    assert {name: count for name, count in lines.items() if count > 500} == {}
