"""Unpacks the symbols of a container in memory of the host, and adds differences to what they count from.

See ``symbols`` for both. Arrays; numba's kernels do the work, or torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckpt8.codecs.lattice import RESERVED
from ckpt8.container.frames import split_row
from ckpt8.container.manifest import DIGITS, SYMBOL_LIMIT, Packing
from ckpt8.core.arrays import Array, Arrays
from ckpt8.core.backend import Backend
from ckpt8.core.errors import require
from ckpt8.core.workers import scratch_array


def unpacked(
    parts: Arrays, packings: Mapping[str, Packing], where: str, backend: Backend, *, reuse: bool = False
) -> dict[str, Array]:
    """``parts`` with symbols in place of rows of planes. Raises InputError for what no writer makes.

    With ``reuse`` symbols are in buffers of this thread, until it unpacks again. Messages begin with ``where``.
    """
    result = dict(parts)
    for name, packing in packings.items():
        out = scratch_array(f"unpacked {name}", np.int32, packing.numel) if reuse else np.empty(packing.numel, np.int32)
        _unpack(parts[name], packing, where, backend, out)
        result[name] = out
    return result


def _unpack(row: Array, packing: Packing, where: str, backend: Backend, out: Array) -> None:
    if not packing.numel:
        return
    mode, planes = packing.mode, split_row(row, packing)
    last = packing.numel % DIGITS[mode.base] or DIGITS[mode.base]
    is_sound = int(planes[0][-1]) < mode.base**last
    if is_sound and backend == "numba":
        from ckpt8.container import kernels

        is_sound = kernels.join(planes, mode, out)
    elif is_sound:
        from torch import from_numpy

        from ckpt8.container import symbols

        is_sound = symbols.join([from_numpy(plane) for plane in planes], mode, from_numpy(out))
    require(is_sound, f"{where}: its symbols are not those of their mode; the file is damaged")


def total(differences: Arrays, base: Arrays, where: str, backend: Backend) -> Arrays:
    """The parts whose difference to those of the base is given. It overwrites ``differences``.

    Raises InputError, which begins with ``where``, for what is the difference of no parts.
    """
    for name, part in differences.items():
        if part.dtype == np.int32:
            _add(part, base[name], where, backend)
        else:
            part.view(np.uint8)[:] ^= base[name].view(np.uint8)
    return differences


def _add(symbols: Array, base: Array, where: str, backend: Backend) -> None:
    """Add symbols of a base in place."""
    if backend == "numba":
        from ckpt8.container import kernels

        least, largest = kernels.add(symbols, base)
    else:
        from torch import from_numpy

        from ckpt8.container import symbols as of_tensors

        sums, least, largest = of_tensors.add(from_numpy(symbols), from_numpy(base))
        symbols[:] = sums.numpy()
    require(
        least >= RESERVED and largest < SYMBOL_LIMIT,
        f"{where}: its symbols are not differences to those of its base; the file is damaged",
    )
