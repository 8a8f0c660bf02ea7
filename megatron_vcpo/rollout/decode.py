"""The text of a response, as the environment judges it and samples.jsonl shows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class ResponseDecoder:
    """Token ids of a response to text: special tokens are part of it (a tokenizer may hold <answer> as one), but for
    those at its end that only say that it is over."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = ()) -> None:
        """Args:
        tokenizer: Hugging Face tokenizer; its end-of-text and padding tokens are left out at the end.
        end_ids: further tokens that only end a response: those that the model's files name.
        """
        self._tokenizer = tokenizer
        self._ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *end_ids}

    def __call__(self, ids: Sequence[int]) -> str:
        """Args: ids: [L] of one response."""
        length = len(ids)
        while length and ids[length - 1] in self._ends:
            length -= 1
        return str(self._tokenizer.decode(list(ids[:length]), skip_special_tokens=False))
