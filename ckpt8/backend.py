"""Which implementation runs a codec: plain torch, on any device, is the reference and the default."""

from __future__ import annotations

from typing import Literal

from ckpt8.errors import UsageError

Backend = Literal["torch"]


def resolve(requested: str | None) -> Backend:
    """The backend for one call. Raises UsageError when an explicit request cannot be met."""
    if requested not in (None, "torch"):
        raise UsageError(f"backend {requested!r} is not available; use 'torch'")
    return "torch"
