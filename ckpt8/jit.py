"""Python compiled by numba for the processor at hand: one pass over memory where torch needs one for every operation.

A kernel lets go of the GIL, does IEEE arithmetic in the order written (nothing is contracted or reordered) and is kept
on disk, so that a machine compiles it once. It takes numpy views of flat CPU tensors, and may call other kernels.
Integers are wrapped in ``i4`` at every step: two int32 make an int64 otherwise, of which a vector holds half as many.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import config

i4 = np.int32
f4 = np.float32
f8 = np.float64

MAGNITUDE = 0x7FFFFFFF
"""All bits of an fp32 number but its sign."""


def _cache() -> Path:
    """The folder of this user for what can be made again. Raises RuntimeError where there is no home directory."""
    if sys.platform == "win32":
        named, usual = os.environ.get("LOCALAPPDATA", ""), Path("AppData", "Local")
    elif sys.platform == "darwin":
        named, usual = "", Path("Library", "Caches")
    else:
        named, usual = os.environ.get("XDG_CACHE_HOME", ""), Path(".cache")
    folder = Path(named) if Path(named).is_absolute() else Path.home() / usual
    return folder / "ckpt8" / "kernels"


@contextmanager
def _kept() -> Iterator[None]:
    """Have numba keep what is decorated in the user's cache, unless ``NUMBA_CACHE_DIR`` names a place.

    Beside the source, where it keeps things otherwise, they would be left behind when the package is uninstalled.
    """
    settings = vars(config)
    if settings["CACHE_DIR"]:
        yield
        return
    settings["CACHE_DIR"] = str(_cache())
    try:
        yield
    finally:
        settings["CACHE_DIR"] = ""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` when it is first called."""
    try:
        with _kept():
            return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        # There is no place to keep it.
        return numba.njit(nogil=True, error_model="numpy")(function)


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
