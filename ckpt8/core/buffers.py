"""Buffers that are used again: what threads allocate and free in turn, the allocator keeps in pieces of no use."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_SMALLEST = 1 << 20


class Buffers:
    """A pool of flat uint8 buffers; it grows to as many as are in use at once. Thread-safe."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """The smallest free buffer of at least ``nbytes``, or a new one; its content is arbitrary."""
        with self._lock:
            fitting = [k for k, buffer in enumerate(self._free) if len(buffer) >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda k: len(self._free[k])))
        return self._make(max(_SMALLEST, 1 << (nbytes - 1).bit_length()))

    def give(self, buffer: torch.Tensor) -> None:
        """Give back a buffer that no copy uses any more."""
        with self._lock:
            self._free.append(buffer)
