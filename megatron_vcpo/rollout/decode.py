"""The text of a response, as the environment judges it and samples.jsonl shows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_vcpo.config import ConfigError


class ResponseDecoder:
    """Token ids of a response to text: special tokens are part of it (a tokenizer may hold <answer> as one), but for
    those at its end that only say that it is over."""

    def __init__(self, tokenizer: Any) -> None:
        """Args: tokenizer: Hugging Face tokenizer; a generation_config.json in its folder may name more end tokens.

        Raises ConfigError where that file cannot be read.
        """
        self._tokenizer = tokenizer
        self._ends = end_tokens(tokenizer)

    def __call__(self, ids: Sequence[int]) -> str:
        """Args: ids: [L] of one response."""
        length = len(ids)
        while length and ids[length - 1] in self._ends:
            length -= 1
        return str(self._tokenizer.decode(list(ids[:length]), skip_special_tokens=False))


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that end a response or fill it up: the tokenizer's own, and those of the generation_config.json beside
    it."""
    found = {tokenizer.eos_token_id, tokenizer.pad_token_id, *_configured(Path(str(tokenizer.name_or_path)))}
    return frozenset(token for token in found if token is not None)


def _configured(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is no generation configuration: {error!r}.") from error
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(token, int) for token in listed):
        raise ConfigError(f"{path}: eos_token_id must be a token's number or a list of them, not {ids!r}.")
    return listed
