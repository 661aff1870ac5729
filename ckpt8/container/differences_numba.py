"""Differences of symbols, and their sums, in one pass over memory: the bits of ``differences``."""

from __future__ import annotations

import torch

from ckpt8.codecs.symbols_numba import from_zigzag, zigzag
from ckpt8.core.numba_kernels import i4, kernel


@kernel
def _subtract(symbols, base, out):
    """Return the largest of the differences."""
    largest = i4(0)
    for i in range(symbols.size):
        own, other = symbols[i], base[i]
        far = i4(-1) if own < 0 else zigzag(i4(from_zigzag(own) - from_zigzag(other)))
        found = i4(own + i4(1)) if other < 0 else far
        out[i] = found
        largest = max(largest, found)
    return largest


@kernel
def _add(symbols, base):
    """Add in place; return the smallest and the largest of the sums."""
    least, largest = i4(0), i4(0)
    for i in range(symbols.size):
        own, other = symbols[i], base[i]
        far = i4(-1) if own < 0 else zigzag(i4(from_zigzag(own) + from_zigzag(other)))
        found = i4(own - i4(1)) if other < 0 else far
        symbols[i] = found
        least, largest = min(least, found), max(largest, found)
    return least, largest


def subtract(symbols: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, int]:
    """As ``differences``."""
    out = torch.empty_like(symbols)
    return out, int(_subtract(symbols.numpy(), base.numpy(), out.numpy()))


def add(symbols: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """As ``differences``; the sums are in place of ``symbols``."""
    least, largest = _add(symbols.numpy(), base.numpy())
    return symbols, int(least), int(largest)
