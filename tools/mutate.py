#!/usr/bin/env python3
"""Change one thing in one module and see whether its tests notice; many times over.

    .venv/bin/python tools/mutate.py --count 20 megatron_vcpo/objective/ess.py tests/objective/test_ess.py [more tests]

Runs in a copy of the checkout under a temporary folder, so that processes which the tests start see the change too.
What takes long to import is imported once; every mutant is a fork. Prints each mutant that no test noticed, as a diff,
and at the end their number; exits with 1 where there is any. Mutants are drawn by --seed, the same ones each time.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COPIED = (
    *("megatron_vcpo", "patches", "tests", "tools", "examples", "benchmarks", "docs"),
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CONTRIBUTING.md", "LICENSE"),
)
_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_UNTOUCHED = (ast.Raise, ast.Assert, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.JoinedStr)


def main() -> int:
    """Mutants of one module, each in a process of its own; the number of survivors decides the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="file to change, relative to the checkout")
    parser.add_argument("tests", nargs="+", help="what pytest is given")
    parser.add_argument("--count", type=int, default=20, help="mutants to try at most (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants (default: 0)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one mutant's tests (default: 300)")
    parser.add_argument("--preload", default="torch,numpy,transformers,pytest", help="modules imported once")
    args = parser.parse_args()
    for name in args.preload.split(","):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                # megatron_vcpo/patches stays a link: else a mutant of patches/ would not be what is imported.
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, Path(folder) / name, symlinks=True, ignore=ignore)
            elif source.exists():
                shutil.copy(source, folder)
        return _try_all(args, Path(folder))


def _try_all(args: argparse.Namespace, folder: Path) -> int:
    target = folder / args.module
    original = target.read_text()
    plain = ast.unparse(ast.parse(original))
    target.write_text(plain)
    if _run(folder, args.tests, args.timeout) != "passed":
        print("The tests do not pass without any change; there is nothing to learn from mutants.", file=sys.stderr)
        return 2
    mutants = list(_mutants(plain))
    chosen = random.Random(args.seed).sample(mutants, min(args.count, len(mutants)))
    survivors = 0
    for number, mutant in enumerate(chosen):
        target.write_text(mutant)
        started = time.monotonic()
        outcome = _run(folder, args.tests, args.timeout)
        print(
            f"{args.module} mutant {number + 1}/{len(chosen)}: {outcome} ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        if outcome == "passed":
            survivors += 1
            diff = difflib.unified_diff(plain.splitlines(), mutant.splitlines(), lineterm="", n=1)
            print("\n".join(list(diff)[2:]), flush=True)
    print(f"{args.module}: {survivors} of {len(chosen)} mutants survived (of {len(mutants)} possible ones)")
    return 1 if survivors else 0


def _run(folder: Path, tests: list[str], timeout: float) -> str:
    """'passed', 'failed' or 'timed out'."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        sys.dont_write_bytecode = True  # a file changed twice in one second would be taken for its older self
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.path[0] = str(folder)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        import pytest

        os._exit(int(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider"])))
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"


def _mutants(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    seen = {source}
    for place in range(len(list(_nodes(tree)))):
        for variant in range(2):
            changed = copy.deepcopy(tree)
            node = list(_nodes(changed))[place]
            if not _change(node, variant):
                break
            text = ast.unparse(ast.fix_missing_locations(changed))
            if text not in seen:
                seen.add(text)
                yield text


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What may be changed: no messages, annotations, docstrings or imports."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _UNTOUCHED):
            continue
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and child in getattr(node, "decorator_list", []):
            continue
        if isinstance(child, ast.arguments) or child is getattr(node, "returns", None):
            continue
        yield child
        yield from _nodes(child)


def _change(node: ast.AST, variant: int) -> bool:
    """Change a node in place in its variant-th way; False where there is none."""
    if isinstance(node, ast.Compare) and variant == 0 and type(node.ops[0]) in _COMPARED:
        node.ops[0] = _COMPARED[type(node.ops[0])]()
        return True
    if isinstance(node, ast.BinOp | ast.AugAssign) and variant == 0 and type(node.op) in _COMPUTED:
        node.op = _COMPUTED[type(node.op)]()
        return True
    if isinstance(node, ast.BoolOp) and variant == 0:
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return True
    if isinstance(node, ast.If | ast.IfExp | ast.While) and variant == 0:
        node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
        return True
    if isinstance(node, ast.Constant) and variant == 0 and isinstance(node.value, bool | int | float):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        return True
    bodies = [b for b in (getattr(node, "body", None), getattr(node, "orelse", None)) if isinstance(b, list)]
    if variant == 0 and bodies and not isinstance(node, ast.Module | ast.ClassDef):
        return _drop_statement(bodies)
    return False


def _drop_statement(bodies: list[list[ast.stmt]]) -> bool:
    """Take the last call or assignment to something that lives on out of a block."""
    for body in bodies:
        for i in reversed(range(len(body))):
            statement = body[i]
            called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            stored = isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name)
            if called or stored:
                body[i] = ast.Pass()
                return True
    return False


if __name__ == "__main__":
    sys.exit(main())
