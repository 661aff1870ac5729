"""Shares as bars: one line for each, or two where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from ckpt8.cli.show.tables import wrap

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LONGEST, _SHORTEST = 40, 8
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Share:
    """One bar: its label, its fraction of the whole (0 to 1), and the figures behind it, a column each."""

    label: str
    fraction: float
    figures: tuple[str, ...]


def bar(fraction: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar of ``fraction`` of ``width`` columns, to an eighth of a column. Above zero it is never empty."""
    eighths = min(round(fraction * width * 8), width * 8)
    if fraction > 0:
        eighths = max(eighths, 1)
    if ascii_only:
        return "#" * (-(-eighths // 8) if eighths < 8 else round(eighths / 8))
    whole, part = divmod(eighths, 8)
    return _EIGHTHS[8] * whole + (_EIGHTHS[part] if part else "")


def bars(shares: Sequence[Share], width: int, *, ascii_only: bool = False) -> Iterator[str]:
    """Lines of at most ``width`` columns; a full bar is the largest share."""
    if not shares:
        return
    largest = max(share.fraction for share in shares) or 1.0
    sizes = [max(cell_len(share.figures[k]) for share in shares) for k in range(len(shares[0].figures))]
    behind = sum(sizes) + len(_GAP) * len(sizes)
    label = max(cell_len(share.label) for share in shares)
    room = width - label - len(_GAP) - behind
    beside = room >= _SHORTEST
    length = min(_LONGEST, room if beside else width - len(_GAP) - behind)
    for share in shares:
        drawn = bar(share.fraction / largest, max(length, 1), ascii_only=ascii_only) if length >= 4 else ""
        figures = "".join(
            _GAP + " " * (size - cell_len(text)) + text for text, size in zip(share.figures, sizes, strict=True)
        )
        if beside:
            yield share.label + " " * (label - cell_len(share.label)) + _GAP + drawn.ljust(length) + figures
        else:
            yield from wrap(share.label, width)
            yield _GAP + drawn.ljust(max(length, 0)) + figures
