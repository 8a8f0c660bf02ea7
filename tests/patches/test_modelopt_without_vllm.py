"""In processes of their own: what is imported once stays."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_vcpo"
needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed"
)


def imports_vllm(statement):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; {statement}; print('vllm' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    return done.stdout.split()[-1] == "True"


@needs_modelopt
@pytest.mark.slow
def test_the_plugins_package_keeps_vllm_out_of_megatrons_imports():
    assert not imports_vllm(
        "import megatron_vcpo.launch.flags, megatron.training.training, modelopt.torch.quantization"
    )


@needs_modelopt
@pytest.mark.slow
def test_modelopt_alone_still_imports_vllm():
    assert imports_vllm("import modelopt.torch.quantization")


def test_every_room_that_imports_megatron_training_applies_the_patch_first():
    rooms = {}
    for path in PACKAGE.rglob("*.py"):  # patches/ is a link, which it does not follow
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            if any(re.match(r"(megatron\.training|modelopt)(\.|$)", name or "") for name in names):
                rooms[path] = [folder for folder in path.parents if folder.is_relative_to(PACKAGE)]
    alone = {PACKAGE / "train.py", PACKAGE / "plugin.py"}  # they import the rooms launch and flow before
    assert alone < rooms.keys()
    for path in rooms.keys() - alone:
        assert any("modelopt_without_vllm.apply()" in (room / "__init__.py").read_text() for room in rooms[path]), path
