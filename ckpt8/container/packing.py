"""Packs the symbols of a container in memory of the host, and takes differences to those of a base.

See ``symbols`` for both. Arrays; numba's kernels do the work, or torch.
"""

from __future__ import annotations

import numpy as np

from ckpt8.container.frames import split_row
from ckpt8.container.manifest import SYMBOL_LIMIT, Packing
from ckpt8.container.modes import choose
from ckpt8.core.arrays import Array, Arrays
from ckpt8.core.backend import Backend
from ckpt8.core.errors import RefusedError
from ckpt8.core.workers import scratch_array


def packed(parts: Arrays, backend: Backend, *, reuse: bool = False) -> tuple[dict[str, Array], dict[str, Packing]]:
    """``parts`` with symbols packed, each as a row of planes, and their packings by name. Others are as they were.

    With ``reuse`` the rows are in buffers of this thread, until it packs again.
    """
    result, packings = dict(parts), dict[str, Packing]()
    for name, part in parts.items():
        if part.dtype == np.int32:
            result[name], packings[name] = _pack(part, backend, f"row {name}" if reuse else None)
    return result, packings


def _pack(symbols: Array, backend: Backend, slot: str | None) -> tuple[Array, Packing]:
    if backend == "numba":
        from ckpt8.container import kernels

        counts = kernels.histogram(symbols, kernels.largest(symbols))
        packing = Packing(choose(counts, symbols.size, kernels.expect), symbols.size)
    else:
        packing = Packing(choose(np.bincount(symbols + 1, minlength=2), symbols.size), symbols.size)
    length = sum(packing.plane_lengths)
    row = np.empty(length, np.uint8) if slot is None else scratch_array(slot, np.uint8, length)
    planes = split_row(row, packing)
    if backend == "numba":
        kernels.fill(symbols, packing.mode, planes)
    else:
        from torch import from_numpy

        from ckpt8.container.symbols import write_planes

        write_planes(from_numpy(symbols), packing.mode, [from_numpy(plane) for plane in planes])
    return row, packing


def difference(parts: Arrays, base: Arrays, backend: Backend) -> dict[str, Array]:
    """The differences of ``parts`` to those of the base, as new arrays.

    Raises RefusedError where one is no symbol that can be packed.
    """
    return {name: _difference(part, base[name], backend) for name, part in parts.items()}


def _difference(part: Array, base: Array, backend: Backend) -> Array:
    if part.dtype != np.int32:
        return (part.view(np.uint8) ^ base.view(np.uint8)).view(part.dtype)
    if backend == "numba":
        from ckpt8.container import kernels

        result, largest = kernels.subtract(part, base)
    else:
        from torch import from_numpy

        from ckpt8.container import symbols

        tensor, largest = symbols.subtract(from_numpy(part), from_numpy(base))
        result = tensor.numpy()
    if largest >= SYMBOL_LIMIT - 1:
        raise RefusedError("is too far from its base")
    return result
