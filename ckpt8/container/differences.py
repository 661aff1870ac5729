"""Differences between the parts of two storages on the same lattice, chunk by chunk, and their sums. See FORMAT.md.

Symbols stand for integers q, and -1 for a value of its own; with those of the base:

    base not -1    the difference is -1 where the symbol is -1, else the symbol of q - q of the base
    base -1        the difference is 0 where the symbol is -1, else the symbol + 1

All other parts differ by the exclusive or of their bits.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ckpt8.codecs.symbols import RESERVED, from_zigzag, zigzag
from ckpt8.container.symbol_modes import SYMBOL_LIMIT
from ckpt8.core import backend as backends
from ckpt8.core.errors import InputError, RefusedError
from ckpt8.core.tensors import Parts


def difference(parts: Parts, base: Parts, backend: backends.Backend | None = None) -> Parts:
    """The differences of ``parts`` to those of the base, as new tensors on the same device.

    Raises RefusedError where one is no symbol that can be packed.
    """
    return {name: _difference(part, base[name], backend) for name, part in parts.items()}


def total(differences: Parts, base: Parts, where: str, backend: backends.Backend | None = None) -> Parts:
    """The parts whose ``difference`` to those of the base is given. It overwrites ``differences``.

    Raises InputError, which begins with ``where``, for what is the difference of no parts.
    """
    return {name: _total(part, base[name], where, backend) for name, part in differences.items()}


def _difference(part: torch.Tensor, base: torch.Tensor, backend: backends.Backend | None) -> torch.Tensor:
    if part.dtype is not torch.int32:
        return part.view(torch.uint8).bitwise_xor(base.view(torch.uint8)).view(part.dtype)
    fast = _numba(part, backend)
    found, largest = fast.subtract(part, base) if fast else _subtract(part, base)
    if largest >= SYMBOL_LIMIT - 1:
        raise RefusedError("is too far from its base")
    return found


def _total(part: torch.Tensor, base: torch.Tensor, where: str, backend: backends.Backend | None) -> torch.Tensor:
    if part.dtype is not torch.int32:
        part.view(torch.uint8).bitwise_xor_(base.view(torch.uint8))
        return part
    fast = _numba(part, backend)
    found, least, largest = fast.add(part, base) if fast else _add(part, base)
    if least < RESERVED or largest >= SYMBOL_LIMIT:
        raise InputError(f"{where}: its symbols are not differences to those of its base; the file is damaged")
    return found


def _numba(symbols: torch.Tensor, backend: backends.Backend | None) -> ModuleType | None:
    """The module of numba's kernels where the backend, or by default the size, asks for it."""
    if backends.resolve(backends.on_cpu(backend, symbols.device), symbols.device, symbols.numel()) != "numba":
        return None
    from ckpt8.container import kernels

    return kernels


def _subtract(symbols: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The differences, and the largest of them, at least 0."""
    found = _combined(symbols, base, from_zigzag(symbols).sub_(from_zigzag(base)), 1)
    return found, max(int(found.max()), 0) if found.numel() else 0


def _add(symbols: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The sums, the smallest, at most 0, and the largest, at least 0."""
    found = _combined(symbols, base, from_zigzag(symbols).add_(from_zigzag(base)), -1)
    least, largest = (int(each) for each in found.aminmax()) if found.numel() else (0, 0)
    return found, min(least, 0), max(largest, 0)


def _combined(symbols: torch.Tensor, base: torch.Tensor, q: torch.Tensor, shift: int) -> torch.Tensor:
    """The symbols of ``q``, but where one is reserved: ``symbols`` moved by ``shift`` where that is the base's."""
    found = zigzag(q)
    # Most chunks have none, and to find that out is one pass of memory for each.
    if found.numel() and int(symbols.min()) < 0:
        found.masked_fill_(symbols < 0, RESERVED)
    if found.numel() and int(base.min()) < 0:
        found = found.where(base >= 0, symbols + shift)
    return found
