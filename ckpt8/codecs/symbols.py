"""Integers as symbols, and the dither by element: what the codecs with steps of their own share, in torch."""

from __future__ import annotations

import torch

RESERVED = -1
"""The symbol of an exact zero."""

MULTIPLIERS = (0x9E3779B1, 0x2C1B3C6D, 0x297A2D39)
"""Those of the hash of an element's index, see ``dither``."""


def zigzag(q: torch.Tensor) -> torch.Tensor:
    """Symbols of int32 integers, 0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return (q << 1).bitwise_xor_(q >> 31)


def from_zigzag(symbols: torch.Tensor) -> torch.Tensor:
    """The integers of int32 symbols; the reserved one gives some integer."""
    return (symbols & 1).neg_().bitwise_xor_(symbols >> 1)


def modulo(number: int) -> int:
    """The ``number`` modulo 2^32, as kernels take an index in a storage."""
    return number & 0xFFFFFFFF


def signed(word: int) -> int:
    """The int32 with the lowest 32 bits of ``word``."""
    return (modulo(word) ^ 0x80000000) - 0x80000000


def dither(first: int, count: int, salt: int, device: torch.device) -> torch.Tensor:
    """The dither t of ``count`` elements from index ``first`` on: multiples of 2^-24 from 0 to 1.

    It is a hash of the index and the salt, modulo 2^32:

        h = i * 0x9E3779B1 + salt;  h ^= h >> 15;  h *= 0x2C1B3C6D;  h ^= h >> 12;  h *= 0x297A2D39;  h ^= h >> 15
        t = (h >> 8) * 2^-24
    """
    spread, second, third = map(signed, MULTIPLIERS)
    # int32 wraps around; its shift copies the sign, which the masks take away.
    h = torch.arange(count, dtype=torch.int32, device=device).add_(signed(first))
    h.mul_(spread).add_(signed(salt))
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(second)
    h.bitwise_xor_((h >> 12).bitwise_and_(0xFFFFF)).mul_(third)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF))
    return h.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)
