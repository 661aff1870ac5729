"""Parts one behind the other in one stretch of memory: what a snapshot keeps, and what crosses a bus in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt8.tensors import Parts

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Every part of a row begins at a multiple of these bytes."""


def padded(nbytes: int) -> int:
    """Bytes that something of ``nbytes`` takes in a row."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def row_bytes(parts: Sequence[Parts]) -> int:
    """Bytes of the row that holds ``parts``."""
    return sum(padded(part.numel() * part.element_size()) for each in parts for part in each.values())


def row_views(parts: Sequence[Parts], row: torch.Tensor) -> list[Parts]:
    """Where each of ``parts`` lies in ``row``, flat uint8 of any device: tensors of the same types and lengths."""
    views: list[Parts] = []
    start = 0
    for each in parts:
        views.append({})
        for name, part in each.items():
            length = part.numel() * part.element_size()
            views[-1][name] = row[start : start + length].view(part.dtype)
            start += padded(length)
    return views


def copy_to_row(parts: Sequence[Parts], row: torch.Tensor, *, wait: bool = True) -> list[Parts]:
    """Copy ``parts``, of any device, into ``row``; the copies. Without ``wait`` the copies are only queued."""
    import torch

    copies = row_views(parts, row)
    for each, there in zip(parts, copies, strict=True):
        for name, part in each.items():
            # As bytes: not every device copies every element type.
            there[name].view(torch.uint8).copy_(part.view(torch.uint8), non_blocking=not wait)
    return copies
