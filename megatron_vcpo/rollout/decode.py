"""The text of a response that the environment judges and samples.jsonl shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class ResponseDecoder:
    """Turns a response's token ids into text. It keeps special tokens (<answer> may be one), except those at the end
    that only mark the end."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = ()) -> None:
        """Args:
        tokenizer: Hugging Face tokenizer; its end-of-text and padding tokens are dropped at the end.
        end_ids: further tokens that only mark an end, named by the model's files.
        """
        self._tokenizer = tokenizer
        self._ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *end_ids}

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of one response, ids [L]."""
        length = len(ids)
        while length and ids[length - 1] in self._ends:
            length -= 1
        return str(self._tokenizer.decode(list(ids[:length]), skip_special_tokens=False))
