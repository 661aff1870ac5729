"""numba kernels for the CPU: they go over memory once, where torch goes over it once for every operation.

A kernel lets go of the GIL, does IEEE arithmetic in the order written (nothing is contracted or reordered) and is kept
on disk, so that a machine compiles it once. It takes numpy views of flat CPU tensors, and may call other kernels.
Wrap integers in ``i4`` at every step: otherwise two int32 make an int64, and a vector holds half as many of those.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
import numpy as np

i4 = np.int32
f4 = np.float32
f8 = np.float64

MAGNITUDE = 0x7FFFFFFF
"""All bits of an fp32 number but its sign."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` at its first call, or take it from the cache of this machine."""
    compiled = numba.njit(nogil=True, error_model="numpy")(function)
    # With cache=True numba would keep files of its own, and execute them whoever wrote them.
    with suppress(ImportError):
        # A numba with other internals keeps nothing.
        from ckpt8.core.kernel_cache import KernelCache

        vars(compiled)["_cache"] = KernelCache(function)
    return compiled


def with_bits(*shape: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Memory for fp32 numbers, and the same memory as int32."""
    numbers = np.empty(shape, f4)
    return numbers, numbers.view(i4)


@kernel
def _nothing():
    return 0


def start() -> None:
    """Have numba load what it needs before its first kernel, which takes some tenths of a second."""
    _nothing()
