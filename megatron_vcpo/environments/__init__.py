"""Environments: a prompt in, a reward out.

protocol           what an environment is
registry           make_environment: one by its name
reasoning_gym_env  any task of reasoning-gym
jsonl_math         questions from a file, judged by math-verify
sort_digits        a task for small models
"""

from megatron_vcpo.environments.protocol import Environment, EnvironmentSetupError, Prompt, Split
from megatron_vcpo.environments.registry import make_environment

__all__ = ["Environment", "EnvironmentSetupError", "Prompt", "Split", "make_environment"]
