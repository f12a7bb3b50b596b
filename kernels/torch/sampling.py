"""The noise of sampling in 32-bit integers and float32 alone, for devices without 64-bit numbers."""

import torch


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    """As core/ops/sampling.py says, bit for bit: float32 [num_rows, vocab_size] of int32 [num_rows] each.

    Products wrap, as int32's do. (h + 0.5) / 2^32 is rounded once: the high 24 bits and the low 8 with their half
    are exact.
    """
    key = _mix(_mix(seeds) ^ positions)
    tokens = torch.arange(1, vocab_size + 1, device=seeds.device, dtype=torch.int32)
    h = _mix(key[:, None] + tokens * _signed(0x9E3779B9))
    high = _shift(h, 8).to(torch.float32) * 2.0**-24
    low = ((h & 0xFF).to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-(high + low).clamp(max=1 - 2.0**-24)))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 16)) * _signed(0x7FEB352D)
    x = (x ^ _shift(x, 15)) * _signed(0x846CA68B)
    return x ^ _shift(x, 16)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, zeros from the left."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
