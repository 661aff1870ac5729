"""Python compiled by numba for the processor at hand: one pass over memory where torch needs one for every operation.

A kernel lets go of the GIL, does IEEE arithmetic in the order written (nothing is contracted or reordered) and is kept
on disk, so that a machine compiles it once. It takes numpy views of flat CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SMALLEST = 1 << 17
"""Elements from which on a kernel is worth the import of numba."""


@cache
def fault() -> str | None:
    """Why kernels cannot be compiled; None if they can."""
    try:
        import numba
    except Exception as exc:  # noqa: BLE001 - numba looks at the versions of others, and raises all kinds of errors
        return f"needs the package numba, which cannot be imported: {exc}"
    return "needs numba to compile, which NUMBA_DISABLE_JIT forbids" if numba.config.DISABLE_JIT else None


def kernel(function: F) -> F:
    """Compile ``function`` when it is first called."""
    import numba

    settings = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(**settings, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        # There is no place to keep it: neither beside the source nor in a home directory.
        return numba.njit(**settings)(function)  # type: ignore[no-any-return]
