"""A table that is legible at any width: where its columns do not fit, every row becomes a paragraph.

Nothing is cut. Long names are broken where a component ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = "  "
_BREAKS = re.compile(r"[^.:/_]*[.:/_]?")
"""A stretch of a name up to where it may be broken."""


class Sheet(Table):
    """A ``rich`` table; the first column names the rows."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its rows as paragraphs."""
        if self._natural_width() <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield Text("\n".join(self._paragraphs(options.max_width)))

    def _cells(self) -> list[list[str]]:
        """Plain text by column, the header first."""
        return [[_plain(column.header), *(_plain(cell) for cell in column.cells)] for column in self.columns]

    def _natural_width(self) -> int:
        columns = [max(map(cell_len, cells)) for cells in self._cells()]
        return sum(columns) + len(_GAP) * (len(columns) - 1)

    def _paragraphs(self, width: int) -> Iterator[str]:
        columns = self._cells()
        headers = [column[0] for column in columns]
        if self.title:
            yield from wrap(_plain(self.title), width)
        yield from wrap(headers[0], width)
        for row in range(1, len(columns[0])):
            yield from wrap(columns[0][row], width, first=_GAP, more=_GAP * 2)
            pairs = [
                f"{header} {column[row]}"
                for header, column in zip(headers[1:], columns[1:], strict=True)
                if column[row]
            ]
            yield from pack(pairs, width, indent=_GAP * 2)


def _plain(cell: object) -> str:
    return Text.from_markup(cell, emoji=False).plain if isinstance(cell, str) else str(cell)


def wrap(text: str, width: int, *, first: str = "", more: str = _GAP) -> Iterator[str]:
    """Lines of at most ``width`` columns, broken at blanks; a name that is longer than a line behind its separators.

    ``first`` stands before the first line, ``more`` before the others.
    """
    line, is_empty = first, True
    for part in _parts(text, width - cell_len(more)):
        if not is_empty and cell_len(line) + cell_len(part.rstrip()) > width:
            yield line.rstrip()
            line = more
        line, is_empty = line + part, False
    yield line.rstrip()


def _parts(text: str, width: int) -> Iterator[str]:
    """What must stay together, each with the blank behind it."""
    for word in text.split(" "):
        if cell_len(word) <= width:
            yield f"{word} "
            continue
        *parts, last = filter(None, _BREAKS.findall(word))
        for part in (*parts, f"{last} "):
            rest = part
            while cell_len(rest.rstrip()) > width:
                fits = next(n for n in range(max(width, 1), 0, -1) if n == 1 or cell_len(rest[:n]) <= width)
                yield rest[:fits]
                rest = rest[fits:]
            yield rest


def pack(items: list[str], width: int, *, indent: str = "") -> Iterator[str]:
    """``items`` beside each other, two blanks between them, as many in a line as fit."""
    line = ""
    for item in items:
        if line and cell_len(line) + len(_GAP) + cell_len(item) > width:
            yield line
            line = ""
        if not line and cell_len(indent) + cell_len(item) > width:
            yield from wrap(item, width, first=indent, more=indent + _GAP)
            continue
        line = line + _GAP + item if line else indent + item
    if line:
        yield line
