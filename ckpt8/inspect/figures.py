"""Figures as people read them."""

from __future__ import annotations

from typing import Any


def size(count: float) -> str:
    """Bytes in decimal units, as disks are sold and ``ls --si`` shows them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def percent(fraction: float) -> str:
    """A share of all, rounded down: what is less than all is never shown as 100 %, and what is there never as 0 %."""
    if 0 < fraction < 0.001:
        return "<0.1 %"
    return "0 %" if fraction <= 0 else "100 %" if fraction >= 1 else f"{int(fraction * 1000) / 10:.1f} %"


def differing_line(source: dict[str, Any]) -> str:
    """That ``measured_from`` of ``inspect`` is not what the container was made from; its ``differing`` is not empty."""
    names, path = source["differing"], source["path"]
    what = f"{names[0]} differs" if len(names) == 1 else f"{len(names):,} lossless storages differ, such as {names[0]}"
    return f"not made from {path}: {what}"


def counted(count: int, noun: str) -> str:
    """``1 tensor``, ``3 tensors``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
