"""A small command line that is right, to be spoilt by one flag."""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from examples.char_tokenizer import write_char_tokenizer
from megatron_vcpo.config import ConfigError, PluginConfig
from megatron_vcpo.patches import megatron_cpu

megatron_cpu.install()

MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--ffn-hidden-size", "96"),
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
)
RUN = ("--seq-length", "64", "--train-iters", "4", "--lr", "1e-3", "--lr-decay-style", "constant")
ROLLOUT = (
    *("--rollout-environment", "sort_digits", "--rollout-max-response-length", "8"),
    *("--rollout-prompts-per-step", "4", "--rollout-responses-per-prompt", "4"),
)


@functools.cache
def _remember_docstrings() -> None:
    """Reading Megatron's dataclasses for the words of --help is most of a parse, and comes to the same each time."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    stock, known = ArgumentGroupFactory._get_field_docstrings, dict[type, dict[str, str]]()

    def remembered(self: ArgumentGroupFactory, source: type) -> dict[str, str]:
        if source not in known:
            known[source] = stock(self, source)
        return known[source]

    ArgumentGroupFactory._get_field_docstrings = remembered


@dataclass
class CommandLine:
    """Parses in this process what torchrun would hand to every rank."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    processes: int = 1
    tokenizer: Path = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = self.folder / "tokenizer"
        write_char_tokenizer(self.tokenizer)

    def flags(self, *more: str) -> list[str]:
        """The right flags, and `more`, of which a repeated one wins."""
        return [*MODEL, *RUN, *ROLLOUT, "--rollout-tokenizer", str(self.tokenizer), *more]

    def parse(self, *more: str) -> tuple[argparse.Namespace, PluginConfig]:
        """Up to the plugin's own checks."""
        from megatron_vcpo.launch.flags import parse

        _remember_docstrings()
        self.monkeypatch.setattr(sys, "argv", ["train.py", *self.flags(*more)])
        self.monkeypatch.setenv("RANK", "0")
        self.monkeypatch.setenv("WORLD_SIZE", str(self.processes))
        return parse()

    def check(self, *more: str) -> tuple[argparse.Namespace, PluginConfig]:
        """Everything that is checked before a process group exists, as a dry run, which leaves no globals behind."""
        from megatron_vcpo.launch import preflight
        from megatron_vcpo.launch.flags import finish

        args, config = self.parse(*more, "--vcpo-dry-run")
        inputs = preflight.check(args, config)
        finish(args, config, inputs.vocab_size)
        preflight.check_model(args, config, inputs.vocab_size)
        return args, config

    def refusal(self, *more: str) -> str:
        """The sentence with which the flags are refused."""
        with pytest.raises(ConfigError) as caught:
            self.check(*more)
        sentence = str(caught.value)
        assert "\n" not in sentence
        assert sentence.endswith((".", ".)", "?"))
        return sentence
