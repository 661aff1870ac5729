"""Makes text from files safe to print, and writes sizes, shares and counts."""

import re
from collections.abc import Iterable
from typing import Any


def printable(text: str) -> str:
    """``text`` with every unprintable character escaped: one line, without terminal commands."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def printable_tree(tree: Any) -> Any:
    """A copy of a tree of plain values in which every text is ``printable``."""
    if isinstance(tree, str):
        return printable(tree)
    if isinstance(tree, dict):
        return {key: printable_tree(value) for key, value in tree.items()}
    return [printable_tree(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def natural_order(text: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names by value: ``run-9`` comes before ``run-10``."""
    return [
        (len(part.lstrip("0")), part.lstrip("0")) if k % 2 else (-1, part)
        for k, part in enumerate(re.split(r"([0-9]+)", text))
    ]


def listed(names: Iterable[object], limit: int = 3) -> str:
    """The first names, and how many more there are, for a message of one line."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")


def shortened(text: str, most: int) -> str:
    """``text``, or its first ``most`` characters and an ellipsis."""
    return text if len(text) <= most else text[:most] + "…"


def shown(text: object) -> str:
    """``text`` for a message: one line of bounded length."""
    return shortened(repr(text) if isinstance(text, str) else str(text), 60)


def box_text(offsets: Iterable[int], sizes: Iterable[int], shape: Iterable[int]) -> str:
    """The place of a part in a tensor, ``[0:64,:]``, to append to its name; empty for the whole tensor."""
    parts = list(zip(offsets, sizes, shape, strict=True))
    if all(size == whole for _, size, whole in parts):
        return ""
    return f"[{','.join(':' if size == whole else f'{at}:{at + size}' for at, size, whole in parts)}]"


def size(count: float) -> str:
    """Bytes in decimal units (1 kB = 1000 B), as ``ls --si`` shows them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def percent(part: float, whole: float = 1) -> str:
    """A share of ``whole``, rounded down: less than all is never 100 %, more than nothing never 0 %."""
    if not whole:
        return "-"
    fraction = part / whole
    if 0 < fraction < 0.001:
        return "<0.1 %"
    return "0 %" if fraction <= 0 else "100 %" if fraction >= 1 else f"{int(fraction * 1000) / 10:.1f} %"


def differing_line(source: dict[str, Any]) -> str:
    """The line that a container was not made from ``source``, the ``measured_from`` of ``inspect``; names a storage."""
    names, path = source["differing"], source["path"]
    what = f"{names[0]} differs" if len(names) == 1 else f"{len(names):,} lossless storages differ, such as {names[0]}"
    return f"not made from {path}: {what}"


def counted(count: int, noun: str) -> str:
    """``1 tensor``, ``3 tensors``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
