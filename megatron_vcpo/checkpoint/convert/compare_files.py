"""Check whether two model folders agree besides their weights: end tokens, generation settings, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_vcpo.checkpoint.model_files import TOKEN_FIELDS, ModelFiles, as_list, load_tokenizer

# Fields of generation_config.json that say who wrote it, and do not affect generation.
_WRITER = ("transformers_version", "_from_model_config")


def file_differences(a: ModelFiles, b: ModelFiles) -> list[str]:
    """One line for each difference in how the folders are used.

    Raises:
        CheckpointError: a tokenizer must be loaded to be compared, but cannot be.
    """
    return [*_token_lines(a, b), *_generation_lines(a, b), *_tokenizer_lines(a, b)]


def _token_lines(a: ModelFiles, b: ModelFiles) -> Iterator[str]:
    for field in TOKEN_FIELDS:
        first, second = a.tokens[field], b.tokens[field]
        if as_list(first) != as_list(second):
            yield f"{field} of config.json: {_show(first)} in A, {_show(second)} in B"


def _generation_lines(a: ModelFiles, b: ModelFiles) -> Iterator[str]:
    first, second = _generation(a), _generation(b)
    for field in sorted(first.keys() | second.keys()):
        one, other = first.get(field), second.get(field)
        same = as_list(one) == as_list(other) if field in TOKEN_FIELDS else one == other
        if not same:
            yield f"{field} of generation_config.json: {_show(one)} in A, {_show(other)} in B"


def _generation(files: ModelFiles) -> dict[str, Any]:
    """The generation settings; without a generation_config.json, transformers and vLLM use config.json's tokens."""
    fields = files.tokens if files.generation is None else files.generation
    return {name: value for name, value in fields.items() if name not in _WRITER and value is not None}


def _tokenizer_lines(a: ModelFiles, b: ModelFiles) -> Iterator[str]:
    if a.has_tokenizer != b.has_tokenizer:
        yield f"tokenizer: only in {'A' if a.has_tokenizer else 'B'}"
    elif a.has_tokenizer and not _same_bytes(a, b):
        first, second = _described(a), _described(b)
        for part in first:
            if first[part] != second[part]:
                yield f"tokenizer: {part} in A and B"


def _same_bytes(a: ModelFiles, b: ModelFiles) -> bool:
    return a.tokenizer.keys() == b.tokenizer.keys() and all(
        file.read_bytes() == b.tokenizer[name].read_bytes() for name, file in a.tokenizer.items()
    )


def _described(files: ModelFiles) -> dict[str, Any]:
    """A tokenizer's behaviour, since different files may hold the same tokenizer."""
    tokenizer = load_tokenizer(next(iter(files.tokenizer.values())).parent)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    pipeline = json.loads(backend.to_str()) if backend is not None else {}
    added = {number: (token.content, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    return {
        "other tokens": tokenizer.get_vocab(),
        "other added tokens": added,
        "another way from text to tokens and back": {
            part: pipeline.get(part) for part in ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
        },
        "other special tokens": tokenizer.special_tokens_map,
        "another chat template": tokenizer.chat_template,
    }


def _show(value: Any) -> str:
    return "none" if value is None else str(value)
