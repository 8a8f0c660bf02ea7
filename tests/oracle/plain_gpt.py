"""A Qwen3 model, dense or with experts, in plain torch: one sequence at a time, written without Megatron.

Weights are a dict of Hugging Face names; whatever dtype they have is the dtype of every operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

Weights = dict[str, Tensor]

_EPSILON, _ROTARY_BASE = 1e-5, 10_000.0  # Megatron's defaults


@dataclass(frozen=True, kw_only=True)
class PlainGPT:
    """Sizes; those of tests/oracle/layouts.py by default."""

    vocab: int = 61
    layers: int = 4
    hidden: int = 32
    heads: int = 4
    query_groups: int = 2
    ffn: int = 64  # of one expert: 32
    experts: int = 0
    top_k: int = 2
    tied: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every parameter."""
        width = self.hidden // self.heads
        sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            sizes |= {
                f"{layer}.input_layernorm.weight": (self.hidden,),
                f"{layer}.self_attn.q_proj.weight": (self.heads * width, self.hidden),
                f"{layer}.self_attn.k_proj.weight": (self.query_groups * width, self.hidden),
                f"{layer}.self_attn.v_proj.weight": (self.query_groups * width, self.hidden),
                f"{layer}.self_attn.o_proj.weight": (self.hidden, self.heads * width),
                f"{layer}.self_attn.q_norm.weight": (width,),
                f"{layer}.self_attn.k_norm.weight": (width,),
                f"{layer}.post_attention_layernorm.weight": (self.hidden,),
            }
            if self.experts:
                sizes[f"{layer}.mlp.gate.weight"] = (self.experts, self.hidden)
            for block in [f"{layer}.mlp.experts.{e}" for e in range(self.experts)] or [f"{layer}.mlp"]:
                sizes[f"{block}.gate_proj.weight"] = (self.ffn, self.hidden)
                sizes[f"{block}.up_proj.weight"] = (self.ffn, self.hidden)
                sizes[f"{block}.down_proj.weight"] = (self.hidden, self.ffn)
        sizes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            sizes["lm_head.weight"] = (self.vocab, self.hidden)
        return sizes

    def logits(self, weights: Weights, ids: Tensor) -> Tensor:
        """[T] token ids to [T, vocab]."""
        x = weights["model.embed_tokens.weight"][ids]
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            x = x + self._attention(weights, f"{layer}.self_attn", _norm(weights, f"{layer}.input_layernorm", x))
            y = _norm(weights, f"{layer}.post_attention_layernorm", x)
            x = x + (self._experts(weights, f"{layer}.mlp", y) if self.experts else _mlp(weights, f"{layer}.mlp", y))
        head = weights["model.embed_tokens.weight" if self.tied else "lm_head.weight"]
        return _norm(weights, "model.norm", x) @ head.T

    def _attention(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        def heads(part: str, count: int) -> Tensor:
            return (x @ weights[f"{name}.{part}_proj.weight"].T).view(len(x), count, -1).transpose(0, 1)

        q = _rotate(_norm(weights, f"{name}.q_norm", heads("q", self.heads)))  # [heads, T, width]
        k = _rotate(_norm(weights, f"{name}.k_norm", heads("k", self.query_groups)))
        v = heads("v", self.query_groups)
        repeats = self.heads // self.query_groups
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.size(-1))
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(future, -math.inf), -1) @ v
        return mixed.transpose(0, 1).reshape(len(x), -1) @ weights[f"{name}.o_proj.weight"].T

    def _experts(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        top = (x @ weights[f"{name}.gate.weight"].T).topk(self.top_k, -1)
        shares = torch.softmax(top.values, -1)  # [T, k]
        every = torch.stack([_mlp(weights, f"{name}.experts.{e}", x) for e in range(self.experts)], 1)
        chosen = every.gather(1, top.indices[..., None].expand(-1, -1, x.size(-1)))
        return (shares[..., None] * chosen).sum(1)


def _norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPSILON) * weights[f"{name}.weight"]


def _mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    gate, up = x @ weights[f"{name}.gate_proj.weight"].T, x @ weights[f"{name}.up_proj.weight"].T
    return (silu(gate) * up) @ weights[f"{name}.down_proj.weight"].T


def _rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of [heads, T, width]; the two halves of a head are the two coordinates."""
    half = x.size(-1) // 2
    frequencies = _ROTARY_BASE ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.size(1), dtype=x.dtype)[:, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)
