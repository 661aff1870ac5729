"""Reads many small pieces of a file without Python: a sample of a checkpoint is some ten thousand of them.

In Python each takes a list, a view, and the lock twice, which other threads want.
"""

from typing import Any

import numpy as np

from ckpt8.core.arrays import Array
from ckpt8.core.numba import Foreign, i4, kernel

_pread = Foreign("pread", "int64(int32, uintp, uintp, int64)")


@kernel
def _read(descriptor, starts, length, out):
    """Return how many pieces are there before the first one that is not read whole."""
    for k in range(starts.size):
        piece = out[k * length : (k + 1) * length]
        if _pread(descriptor, piece.ctypes.data, length, starts[k]) != length:
            return k
    return starts.size


def read(descriptor: int, starts: Array, length: int, buffer: memoryview) -> int:
    """Fill ``buffer`` with pieces of ``length`` bytes at ``starts``, int64, up to one that cannot be read whole.

    Returns their number.
    """
    out: Any = np.frombuffer(buffer, np.uint8)
    return int(_read(i4(descriptor), starts, length, out))
