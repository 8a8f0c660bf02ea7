"""A 64-bit digest of a tensor's bits that trainer and engine compute alike, on a CPU or a GPU."""

from __future__ import annotations

import functools

import torch

_CHUNK = 1 << 17  # 32-bit words per block, so that a block fits a cache
_ROUNDS = 0x9E3779B97F4A7C15  # odd, as in splitmix64
_MIX = 0x45D9F3B  # odd, so that mixing one word is invertible
_MASK = (1 << 64) - 1
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def digest(tensor: torch.Tensor) -> int:
    """Digest of element size, shape, and every element with its position; -0.0 counts as 0.0.

    Each word is mixed invertibly with a key that depends on its position, and the results are summed. So a flipped bit
    changes the digest, and so does exchanging two elements.
    """
    values = tensor.detach().contiguous().flatten()
    keys = _keys(str(values.device))
    per_word = max(1, values.element_size() // 4)
    step = _CHUNK // per_word
    sums = [_mixed_sum(values[start : start + step], keys) for start in range(0, values.numel(), step)]
    total = values.element_size()
    for part in torch.stack(sums).tolist() if sums else ():
        total = (total * _ROUNDS + part) & _MASK
    for size in tensor.shape:
        total = (total * _ROUNDS + size) & _MASK
    return total


def _mixed_sum(values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    if values.dtype.is_floating_point:
        values = values + 0.0
    words = values.view(_WORDS[values.element_size()])
    mixed = words + keys[: words.numel()]  # int32, whatever the words' dtype
    mixed ^= mixed >> 16
    mixed *= _MIX
    return mixed.sum(dtype=torch.int64)


@functools.lru_cache(maxsize=4)
def _keys(device: str) -> torch.Tensor:
    """[_CHUNK] int32, pseudo-random."""
    mixed = torch.arange(1, _CHUNK + 1, dtype=torch.int64) * -7046029254386353131  # wraps
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    return ((mixed ^ (mixed >> 27)) >> 16).to(torch.int32).to(device)
