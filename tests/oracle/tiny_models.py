"""Small Hugging Face checkpoints with a character tokenizer, and the log-probs transformers gives for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PAD, EOS, UNK = 0, 1, 2
_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's CPU attention takes no less
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.1,  # larger than usual: log-probs then depend on every weight
}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character or newline, 99 in all."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNK}
    for character in [*(chr(code) for code in range(32, 127)), "\n"]:
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def build(kind: str, seed: int) -> torch.nn.Module:
    """A random fp32 model: 'llama' (vocabulary of 99, padded by vLLM), 'llama-tied' or 'moe'."""
    torch.manual_seed(seed)
    if kind == "moe":
        config = Qwen3MoeConfig(
            vocab_size=128,
            intermediate_size=128,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            tie_word_embeddings=False,
            **_COMMON,
        )
        return Qwen3MoeForCausalLM(config).eval()
    config = LlamaConfig(vocab_size=99, intermediate_size=128, tie_word_embeddings=kind == "llama-tied", **_COMMON)
    return LlamaForCausalLM(config).eval()


def save(kind: str, seed: int, folder: Path) -> Path:
    """Write such a model and its tokenizer to `folder`."""
    build(kind, seed).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path) -> torch.nn.Module:
    """The saved model in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs(model: torch.nn.Module, ids: list[int], start: int, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of ids[start:] given what stands before each, [len(ids) - start]."""
    logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0].numpy()
