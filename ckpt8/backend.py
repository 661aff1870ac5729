"""Which implementation runs a codec: plain torch is the reference; on CUDA devices there are Triton kernels.

Both give the same parts, bit for bit. ``triton`` is the default for tensors on a CUDA device, ``torch`` everywhere
else, and there too where triton is missing or too old. With ``TRITON_INTERPRET=1`` in the environment ``triton`` may
also be asked for on a CPU, where its interpreter runs the kernels: slow, and for tests.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Literal

from ckpt8.errors import UsageError

if TYPE_CHECKING:
    import torch

Backend = Literal["torch", "triton"]

OLDEST_TRITON = (3, 6)
"""Before it ``div_rn`` and ``sqrt_rn`` took subnormal numbers for zero on a device: small second moments were lost."""


@cache
def _fault_of_triton() -> str | None:
    """Why the kernels cannot be run; None if they can."""
    try:
        import triton
    except ImportError:
        return "needs the package triton, which cannot be imported"
    if tuple(int(number) for number in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"needs triton {oldest} or newer, not {triton.__version__}"
    return None


def obstacle(device: torch.device) -> str | None:
    """Why kernels cannot be run on tensors of ``device``; None if they can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs tensors on a CUDA device, not on {str(device)!r}"
    return _fault_of_triton()


def resolve(requested: str | None, device: torch.device | None = None) -> Backend:
    """The backend for one call on tensors of ``device``; None for a codec that has no kernels.

    Raises UsageError when an explicit request cannot be met.
    """
    if requested not in (None, "torch", "triton"):
        raise UsageError(f"backend {requested!r} does not exist; use 'torch' or 'triton'")
    if requested is None:
        on_cuda = device is not None and device.type == "cuda"
        return "triton" if on_cuda and _fault_of_triton() is None else "torch"
    if requested == "torch":
        return "torch"
    if device is None:
        raise UsageError("backend 'triton' has no kernels for this codec; use 'torch'")
    if fault := obstacle(device):
        raise UsageError(f"backend 'triton' {fault}; use 'torch'")
    return "triton"
