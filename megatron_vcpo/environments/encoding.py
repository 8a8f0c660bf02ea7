"""Turn a prompt into the token ids that the policy sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_vcpo.environments.protocol import Prompt


def encode_prompt(tokenizer: Any, prompt: Prompt, *, chat: bool) -> tuple[Prompt, list[int]]:
    """The prompt and its token ids. With `chat` it is one user message, and the prompt gets the template's text
    (`rendered`)."""
    if not chat:
        return prompt, list(tokenizer.encode(prompt.text))
    messages = [{"role": "user", "content": prompt.text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # The template has added the special tokens already.
    return replace(prompt, rendered=rendered), list(tokenizer.encode(rendered, add_special_tokens=False))
