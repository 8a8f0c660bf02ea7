"""A 64-bit digest of a tensor's bits that trainer and engine compute alike, wherever the tensor lies."""

from __future__ import annotations

import functools

import torch

_CHUNK = 1 << 18  # elements; bounds the extra memory to a few megabytes
_ROUNDS = 0x9E3779B97F4A7C15  # odd, as in splitmix64
_MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> int:
    """Digest of element size, shape and every element in its place; -0.0 counts as 0.0.

    A sum of the elements' bits, each times a factor of its position, modulo 2^64: two elements that are exchanged
    change it, and so does one flipped bit.
    """
    values = tensor.detach().contiguous().flatten()
    if values.dtype.is_floating_point:
        values = values + 0.0
    bits = values.view(_BITS[values.element_size()])
    factors = _factors(str(bits.device))
    sums = [
        (bits[start : start + _CHUNK].to(torch.int64) * factors[: min(_CHUNK, bits.numel() - start)]).sum()
        for start in range(0, bits.numel(), _CHUNK)
    ]
    total = 0
    for part in torch.stack(sums).tolist() if sums else ():
        total = (total * _ROUNDS + part) & _MASK
    for size in tensor.shape:
        total = (total * _ROUNDS + size) & _MASK
    return (total * _ROUNDS + tensor.element_size()) & _MASK


@functools.lru_cache(maxsize=4)
def _factors(device: str) -> torch.Tensor:
    """[_CHUNK] odd factors without a pattern."""
    index = torch.arange(1, _CHUNK + 1, dtype=torch.int64)
    mixed = index * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number; wraps
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    return ((mixed ^ (mixed >> 27)) | 1).to(device)
