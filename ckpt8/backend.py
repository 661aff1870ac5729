"""Which implementation runs a codec: plain torch is the reference; on CUDA devices there are Triton kernels.

Both give the same parts, bit for bit. ``torch`` runs on every device and is the default everywhere else; ``triton`` is
the default for tensors on a CUDA device. With ``TRITON_INTERPRET=1`` in the environment it may also be asked for on a
CPU, where Triton's interpreter runs the kernels: slow, and for tests.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING, Literal

from ckpt8.errors import UsageError

if TYPE_CHECKING:
    import torch

Backend = Literal["torch", "triton"]


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def resolve(requested: str | None, device: torch.device | None = None) -> Backend:
    """The backend for one call on tensors of ``device``; None for a codec that has no kernels.

    Raises UsageError when an explicit request cannot be met.
    """
    if requested not in (None, "torch", "triton"):
        raise UsageError(f"backend {requested!r} does not exist; use 'torch' or 'triton'")
    if requested is None:
        return "triton" if device is not None and device.type == "cuda" and _triton_is_installed() else "torch"
    if requested == "torch":
        return "torch"
    if device is None:
        raise UsageError("backend 'triton' has no kernels for this codec; use 'torch'")
    if not _triton_is_installed():
        raise UsageError("backend 'triton' needs the package triton, which is not installed; use 'torch'")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError(f"backend 'triton' needs tensors on a CUDA device, not on {str(device)!r}; use 'torch'")
    return "triton"
