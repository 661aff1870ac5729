"""Chooses the implementation that runs a codec: the reference in torch, Triton kernels for CUDA, numba's for CPUs.

All three give the same parts, bit for bit. By default a tensor on a CUDA device takes ``triton``, a large one on a CPU
``numba``, and every other ``torch``, which also steps in for a package that is missing or too old. Arrays of one
checkpoint all take the same: see ``for_arrays``.

With ``TRITON_INTERPRET=1`` in the environment ``triton`` also runs on a CPU, in its slow interpreter, for tests.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

from ckpt8.core.errors import UsageError
from ckpt8.core.log import log

if TYPE_CHECKING:
    import torch

Backend = Literal["torch", "triton", "numba"]

OLDEST_TRITON = (3, 6)
"""Older versions flush subnormal numbers to zero in ``div_rn`` and ``sqrt_rn``, and lose small second moments."""

SMALLEST_FOR_NUMBA = 1 << 17
"""The fewest elements for which calling a numba kernel pays."""

LEAST_FOR_NUMBA = 1 << 25
"""The fewest bytes of a checkpoint for which numba pays: kernels start in 0.1 s, on a new machine in five seconds."""


_runs_numba = False


@cache
def _fault_of_numba(*, writes: bool = False) -> str | None:
    """Why numba cannot compile kernels, those that write containers among them or not; None if it can."""
    try:
        from ckpt8.core.numba import start

        start(writes=writes)
        global _runs_numba  # noqa: PLW0603 - of this process
        _runs_numba = True
    except Exception as exc:
        log.info("numba cannot compile kernels, so that torch takes its place: %s", exc)
        return f"needs the package numba, which cannot compile kernels: {exc}"
    return None


def runs_numba() -> bool:
    """Whether kernels of numba run in this process: some work has asked for them, and numba can compile them."""
    return _runs_numba


@cache
def _fault_of_triton() -> str | None:
    """Why Triton cannot run kernels; None if it can."""
    try:
        import triton
    except ImportError:
        return "needs the package triton, which cannot be imported"
    if tuple(int(number) for number in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return f"needs triton {'.'.join(map(str, OLDEST_TRITON))} or newer, not {triton.__version__}"
    return None


def obstacle(device: torch.device) -> str | None:
    """Why Triton cannot run kernels on tensors of ``device``; None if it can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs tensors on a CUDA device, not on {str(device)!r}"
    return _fault_of_triton()


def resolve(requested: str | None, device: torch.device | None = None, numel: int = 0) -> Backend:
    """The backend for one call on ``numel`` elements on ``device``; None for a codec that has no kernels.

    Raises UsageError when an explicit request cannot be met.
    """
    if requested is not None and requested not in get_args(Backend):
        raise UsageError(f"backend {requested!r} does not exist; use 'torch', 'triton' or 'numba'")
    if requested is None and device is not None:
        if device.type == "cuda" and _fault_of_triton() is None:
            return "triton"
        return "numba" if numel >= SMALLEST_FOR_NUMBA and _obstacle_to_numba(device) is None else "torch"
    if requested in (None, "torch"):
        return "torch"
    if device is None:
        raise UsageError(f"backend {requested!r} has no kernels for this codec; use 'torch'")
    if fault := obstacle(device) if requested == "triton" else _obstacle_to_numba(device):
        raise UsageError(f"backend {requested!r} {fault}; use 'torch'")
    return "triton" if requested == "triton" else "numba"


def for_arrays(nbytes: int, *, writes: bool = False) -> Backend:
    """The backend for arrays of a checkpoint of so many bytes, of which a container is read, or made and measured.

    It is torch for a small one if it is imported, or if this machine would first have to compile; else numba. torch
    takes the place of a numba that is missing. Raises ModuleNotFoundError without either.
    """
    if nbytes < LEAST_FOR_NUMBA and ("torch" in sys.modules or not _is_compiled(writes=writes)):
        with suppress(ImportError):
            import torch

            return "torch"
    if _fault_of_numba(writes=writes) is None:
        return "numba"
    import torch  # noqa: F401 - raises here, not in the middle of the work

    return "torch"


@cache
def _is_compiled(*, writes: bool) -> bool:
    from ckpt8.core.numba import is_kept

    return is_kept(writes=writes)


def _obstacle_to_numba(device: torch.device) -> str | None:
    return _fault_of_numba() if device.type == "cpu" else f"needs tensors on the CPU, not on {str(device)!r}"
