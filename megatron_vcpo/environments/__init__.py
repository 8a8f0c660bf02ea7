"""Tasks: a prompt in, a reward out. Light to import, because every reward process imports it."""

from megatron_vcpo.environments.protocol import Environment, EnvironmentSetupError, Prompt, Split, draw_prompt
from megatron_vcpo.environments.registry import make_environment

__all__ = ["Environment", "EnvironmentSetupError", "Prompt", "Split", "draw_prompt", "make_environment"]
