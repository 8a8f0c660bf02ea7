"""Where a response ends, by the model's files and the flags. Training and evaluation both use this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_vcpo.checkpoint.model_files import ModelFiles
from megatron_vcpo.config import ConfigError, RolloutConfig
from megatron_vcpo.engines.protocol import Sampling


def stop_token_ids(rollout: RolloutConfig, models: Sequence[ModelFiles], tokenizer: Any, vocab_size: int) -> list[int]:
    """Every token that ends a response, in ascending order.

    These are the tokens named in the files, the tokenizer's end of text, each --rollout-stop that is a single token (an
    engine may not see the text of special tokens), and --rollout-stop-token-ids.

    Args:
        rollout: the flags.
        models: files of the model, and of the folder that an engine reads.
        tokenizer: Hugging Face tokenizer.
        vocab_size: rows of the embedding.

    Raises:
        ConfigError: a token is not in the vocabulary, or the tokenizer lacks one of the model's end tokens; names the
            flag or folder.
    """
    named = [(f"{files.folder} (eos_token_id)", files.end_ids) for files in models]
    if tokenizer.eos_token_id is not None:
        named.append((f"--rollout-tokenizer {rollout.tokenizer}", [tokenizer.eos_token_id]))
    added = tokenizer.get_added_vocab()
    named.append(("--rollout-stop", [added[text] for text in rollout.stop or [] if text in added]))
    named.append(("--rollout-stop-token-ids", rollout.stop_token_ids or []))
    for source, ids in named:
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"{source} names the stop token {token}, and the vocabulary has the tokens 0 to {vocab_size - 1}; "
                    "correct it."
                )
    for files in models:
        for token in files.end_ids:
            if token >= len(tokenizer):
                raise ConfigError(
                    f"{files.folder} names {token} as the token that ends a response, and --rollout-tokenizer "
                    f"{rollout.tokenizer} has {len(tokenizer)} tokens: it is the tokenizer of another model."
                )
    return sorted({token for _, ids in named for token in ids})


def describe_stops(rollout: RolloutConfig, tokenizer: Any | None = None) -> str:
    """A readable list of the stop tokens, with their text if the tokenizer is given, and of the stop strings."""
    tokens = [
        str(token) if tokenizer is None else f"{token} {tokenizer.convert_ids_to_tokens(token)!r}"
        for token in rollout.stop_token_ids or []
    ]
    parts = [f"token{'s' * (len(tokens) > 1)} {', '.join(tokens)}"] if tokens else []
    parts += [f"text {', '.join(map(repr, rollout.stop))}"] if rollout.stop else []
    return "; ".join(parts) or "nothing but --rollout-max-response-length"


def sampling(rollout: RolloutConfig, temperature: float) -> Sampling:
    """The sampling settings for responses at a temperature."""
    return Sampling(
        max_tokens=rollout.max_response_length,
        temperature=temperature,
        stop=tuple(rollout.stop or ()),
        stop_token_ids=tuple(rollout.stop_token_ids or ()),
    )
