"""In processes of their own: what is imported once stays."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed")


def imports_vllm(statement):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; {statement}; print('vllm' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    return done.stdout.split()[-1] == "True"


def test_the_plugins_package_keeps_vllm_out_of_megatrons_imports():
    assert not imports_vllm(
        "import megatron_vcpo.launch.flags, megatron.training.training, modelopt.torch.quantization"
    )


def test_modelopt_alone_still_imports_vllm():
    assert imports_vllm("import modelopt.torch.quantization")
