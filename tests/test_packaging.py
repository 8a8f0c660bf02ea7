"""What pip installs: one wheel is built from a copy of the checkout, installed into a folder of its own beside the
pinned packages, and used from a folder that is empty."""

from __future__ import annotations

import ast
import email
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from packaging.requirements import Requirement

import megatron_vcpo
from examples.char_tokenizer import write_char_tokenizer
from tests.oracle.command_line import MODEL, ROLLOUT, RUN

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = (
    *("megatron_vcpo", "patches", "tools", "tests", "examples", "benchmarks"),
    *("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"),
)
COMMANDS = {
    "vcpo-train": "torchrun --nproc-per-node N -m megatron_vcpo.train FLAGS",
    "vcpo-supervised": "torchrun --nproc-per-node N -m megatron_vcpo.train FLAGS, or -m megatron_vcpo.supervised",
    "vcpo-convert-hf-to-megatron": "Convert a Hugging Face checkpoint to Megatron's",
    "vcpo-convert-megatron-to-hf": "Convert a distributed checkpoint that training saved",
    "vcpo-verify-checkpoint": "Compare two checkpoints",
    "vcpo-quantize-for-rollout": "Quantize a checkpoint with NVIDIA's Model Optimizer",
    "vcpo-mismatch-report": "Split the difference between training's and rollout's log-probs",
    "vcpo-plot-run": "Draw one run, or several",
}
# Distributions that are imported under another name.
DISTRIBUTIONS = {"megatron": "megatron-core", "modelopt": "nvidia-modelopt"}

# Imports once what takes long, then does each job, a line of stdin, in a fork, and answers with its exit code.
FORKS = """
import importlib, json, os, runpy, sys, traceback
from megatron_vcpo.patches import megatron_cpu, modelopt_without_vllm

modelopt_without_vllm.apply()
megatron_cpu.install()
import matplotlib.pyplot, megatron.training, reasoning_gym, transformers.utils

def do(folder, output, how, what, arguments):
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.argv = [what, *arguments]
    try:
        importlib.import_module(what) if how == "import" else runpy.run_path(what, run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 99
    return 0

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = do(*json.loads(line))
        sys.stdout.flush()
        os._exit(code)
    print("code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

# An environment of one's own, which says where the package lies and what a spawned process would import again.
TASK = """
import sys
import megatron_vcpo
from megatron_vcpo.environments import Prompt


class Task:
    def __init__(self, *, split, seed):
        main = sys.modules["__main__"].__spec__
        print(f"task: {megatron_vcpo.__file__}, {main and main.name}", file=sys.stderr)

    def prompt(self, index):
        return Prompt(text="1:", answer="1")

    def reward(self, prompt, response):
        return 0.0
"""

# Imports the objective where Megatron, vLLM and transformers cannot be, and sees what that does to other packages.
OBJECTIVE = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "vllm", "transformers", "modelopt"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
import megatron_vcpo

others = [name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "modelopt")]
assert not others, f"a reward process would import {others}"
import numpy, torch

before = dict(sys.modules)
import megatron_vcpo.objective

assert all(sys.modules[name] is module for name, module in before.items())
new = {name.partition(".")[0] for name in sys.modules.keys() - before.keys()}
print(*sorted(new - sys.stdlib_module_names))
print(megatron_vcpo.__file__)
"""


def pip(*words: Any) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, words)]
    subprocess.run([*command, "--no-index", "--no-deps"], check=True, timeout=300)


def build(source: Path, folder: Path) -> Path:
    """The wheel of a source tree or archive, made without network in this environment."""
    pip("wheel", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert len(set(archive.namelist())) == len(archive.namelist())
        return {name: archive.read(name) for name in archive.namelist()}


def environment(*paths: Path) -> dict[str, str]:
    """For processes that can import what lies in `paths`, and nothing of the checkout or of their folder."""
    path = os.pathsep.join(map(str, paths))
    return os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Forks:
    """Processes that begin with Megatron imported."""

    server: subprocess.Popen[str]

    def do(self, folder: Path, how: Literal["import", "run"], what: str, *arguments: str) -> tuple[int, str]:
        """Import a module or run a file in `folder`; exit code and output."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output:
            print(json.dumps([str(folder), output.name, how, what, arguments]), file=self.server.stdin, flush=True)
            answer = next((line for line in self.server.stdout if line.startswith("code ")), None)
            assert answer is not None, "the process that makes the forks has ended; its stderr says why"
            return int(answer.split()[1]), output.read()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: a build leaves folders behind, and takes what an earlier one left into the wheel."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCE:
        if (REPOSITORY / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(REPOSITORY / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import the installed package from."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "--target", folder, wheel)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment of one's own."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "task.py").write_text(TASK)
    return folder


@pytest.fixture(scope="module")
def forks(site: Path, tasks: Path) -> Iterator[Forks]:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(site, tasks), cwd=tasks, text=True, **pipes) as server:
        yield Forks(server)


def test_the_wheel_holds_the_whole_package_and_nothing_beside_it(wheel: Path) -> None:
    files = content(wheel)
    information = f"megatron_vcpo-{megatron_vcpo.__version__}.dist-info"
    assert {name.partition("/")[0] for name in files} == {"megatron_vcpo", information}
    assert files[f"{information}/top_level.txt"].split() == [b"megatron_vcpo"]
    package = {name: data for name, data in files.items() if name.startswith("megatron_vcpo/")}
    folders = [REPOSITORY / "megatron_vcpo", REPOSITORY / "megatron_vcpo" / "patches"]  # rglob follows no link
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert package == {
        str(path.relative_to(REPOSITORY)): path.read_bytes() for path in paths if "__pycache__" not in path.parts
    }
    assert "megatron_vcpo/patches/megatron_cpu.py" in package


def test_nothing_in_the_wheel_is_a_link(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert not [entry.filename for entry in archive.infolist() if stat.S_ISLNK(entry.external_attr >> 16)]
    assert not [path for path in site.rglob("*") if path.is_symlink()]


def test_the_sdist_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [member.name.split("/", 1)[-1] for member in archive.getmembers()]
    assert not [name for name in names if name.startswith(("patches/", "tests/", "tools/"))]
    assert content(build(sdist, tmp_path / "wheel")) == content(wheel)


def test_the_metadata_names_version_readme_license_and_extras(wheel: Path) -> None:
    files = content(wheel)
    (told,) = (data.decode() for name, data in files.items() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_string(told)
    assert metadata["Name"] == "megatron_vcpo"
    assert metadata["Version"] == megatron_vcpo.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.12"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (REPOSITORY / "README.md").read_text()
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    core = {requirement.name for requirement in requirements if requirement.marker is None}
    assert {"megatron-core", "torch", "psutil", "math-verify"} <= core
    assert set(metadata.get_all("Provides-Extra", [])) == {"cpu", "gpu", "modelopt", "wandb", "test"}
    gpu = {r.name for r in requirements if r.marker is not None and r.marker.evaluate({"extra": "gpu"})}
    assert gpu == {"vllm", "transformer-engine"}
    assert "apex" not in {requirement.name for requirement in requirements}


def test_what_the_package_imports_is_itself_or_a_requirement(wheel: Path) -> None:
    files = content(wheel)
    (told,) = (data.decode() for name, data in files.items() if name.endswith(".dist-info/METADATA"))
    required = {Requirement(line).name for line in email.message_from_string(told).get_all("Requires-Dist", [])}
    known = sys.stdlib_module_names | {"megatron_vcpo"}
    for name, data in files.items():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(data)):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            for top in {module.partition(".")[0] for module in imported} - known:
                assert DISTRIBUTIONS.get(top, top.replace("_", "-")) in required, f"{name} imports {top}"


def test_the_objective_needs_no_megatron_and_leaves_other_packages_alone(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OBJECTIVE]
    done = subprocess.run(command, cwd=tmp_path, env=environment(site), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["megatron_vcpo", str(site / "megatron_vcpo" / "__init__.py")]


def test_every_module_can_be_imported_first(forks: Forks, wheel: Path, tmp_path: Path) -> None:
    names = [name for name in content(wheel) if name.startswith("megatron_vcpo/") and name.endswith(".py")]
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names]
    results = {module: forks.do(tmp_path, "import", module) for module in modules}
    assert {module: result for module, result in results.items() if result != (0, "")} == {}


def test_the_public_names_are_there(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import megatron_vcpo, megatron_vcpo.objective\n"
        "from megatron_vcpo.optim import EssParamScheduler\n"
        "print(megatron_vcpo.register.__name__, megatron_vcpo.__version__)\n"
    )
    assert forks.do(tmp_path, "run", str(script)) == (0, f"register {megatron_vcpo.__version__}\n")


def test_there_is_a_console_script_for_each_command(site: Path) -> None:
    assert {path.name for path in (site / "bin").iterdir()} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_console_script_explains_itself(name: str, forks: Forks, site: Path, tmp_path: Path) -> None:
    code, output = forks.do(tmp_path, "run", str(site / "bin" / name), "--help")
    assert code == 0, output[-2000:]
    assert output.startswith("usage: ")
    assert COMMANDS[name] in " ".join(output.split())


def dry_run_flags(tokenizer: Path) -> tuple[str, ...]:
    write_char_tokenizer(tokenizer)
    task = ("--rollout-tokenizer", str(tokenizer), "--rollout-environment", "task:Task")
    return *MODEL, *RUN, *ROLLOUT, *task, "--vcpo-dry-run"


def test_a_dry_run_from_an_empty_folder(site: Path, tasks: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    command = [sys.executable, site / "bin" / "vcpo-train", *dry_run_flags(tmp_path / "tokenizer")]
    done = subprocess.run(
        command, cwd=empty, env=environment(site, tasks), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("VCPO dry run: every flag was checked, nothing was started.\n")
    assert f"task: {site / 'megatron_vcpo' / '__init__.py'}, megatron_vcpo.train" in done.stderr
    assert not list(empty.iterdir())


@pytest.mark.parametrize("name", ["train", "supervised"])
def test_what_training_spawns_imports_its_module_and_not_the_script(
    name: str, forks: Forks, site: Path, tmp_path: Path
) -> None:
    flags = dry_run_flags(tmp_path / "tokenizer")
    code, output = forks.do(tmp_path, "run", str(site / "bin" / f"vcpo-{name}"), *flags)
    assert code == 0, output[-2000:]
    assert f"__init__.py, megatron_vcpo.{name}\n" in output
