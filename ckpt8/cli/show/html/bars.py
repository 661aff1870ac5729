"""Rows of a name, a bar and a figure. Bars are SVG in per cent of the available width, so that text keeps its size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ckpt8.cli.show.html.text import decades, power, text

_BAR, _GAP = 11, 3

Stack = Sequence[tuple[str, float, str]]
"""The segments of a bar: style, share of the available width from 0 to 1, and tooltip."""


def row(name: str, bar: str, value: str) -> str:
    """One row of markup."""
    return (
        f'<div class="row"><div class="name">{name}</div><div class="bar">{bar}</div>'
        f'<div class="value">{value}</div></div>'
    )


def stacks(bars: Sequence[Stack]) -> str:
    """Bars below each other. Of several, the first shows the original, and is faint."""
    parts = []
    for line, stack in enumerate(bars):
        at = 0.0
        faint = " faint" if line == 0 and len(bars) > 1 else ""
        for css, share, words in stack:
            place = f'x="{100 * at:.3f}%" y="{line * (_BAR + _GAP)}" width="{100 * share:.3f}%" height="{_BAR}"'
            parts.append(f'<rect class="{css}{faint}" {place}><title>{text(words)}</title></rect>')
            at += share
    height = len(bars) * (_BAR + _GAP) - _GAP
    return f'<svg height="{height}" role="img" aria-label="bar">{"".join(parts)}</svg>'


class LogAxis:
    """A logarithmic axis over the whole width, from a power of ten to another, that holds all ``values`` above 0."""

    def __init__(self, values: Iterable[float]) -> None:
        exponents = [math.log10(value) for value in values if value > 0]
        self._low = math.floor(min(exponents, default=-1) - 1e-9)
        self._high = max(self._low + 1, math.ceil(max(exponents, default=0) + 1e-9))
        self._ticks = decades(self._low, self._high, 7)

    def _place(self, exponent: float) -> str:
        return f"{2 + 96 * (exponent - self._low) / (self._high - self._low):.3f}%"

    def dots(self, dots: Iterable[tuple[str, float, str]]) -> str:
        """Dots on one line: style, value, description. A value of 0 has no dot."""
        parts = [
            f'<line class="grid" x1="{self._place(each)}" x2="{self._place(each)}" y1="-6" y2="24"/>'
            for each in self._ticks
        ]
        parts += [
            f'<circle class="{css}" cx="{self._place(math.log10(value))}" cy="9" r="4.5">'
            f"<title>{text(words)}</title></circle>"
            for css, value, words in dots
            if value > 0
        ]
        return f'<svg height="18" role="img" aria-label="error">{"".join(parts)}</svg>'

    def labels(self) -> str:
        """The row below all others, with the numbers of the axis."""
        labels = "".join(
            f'<text x="{self._place(each)}" y="13" text-anchor="middle">{power(10, each)}</text>'
            for each in self._ticks
        )
        return f'<div class="axis"><div><svg height="18" aria-hidden="true">{labels}</svg></div></div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """The legend of the colours. Each entry is a style and what it stands for."""
    items = "".join(
        f'<span><svg width="11" height="11" aria-hidden="true">{_swatch(css)}</svg>{text(words)}</span>'
        for css, words in entries
    )
    return f'<div class="key">{items}</div>'


def _swatch(css: str) -> str:
    if css.startswith("dot "):
        return f'<circle class="{css[4:]}" cx="5.5" cy="5.5" r="4.5"/>'
    if css == "curve":
        return '<line class="base" x1="0" x2="11" y1="5.5" y2="5.5" stroke-width="2"/>'
    return f'<rect class="{css}" width="11" height="11" rx="2"/>'
