"""Tables for any width: if the columns do not fit, each row becomes a paragraph.

They keep every cell whole and break long names after a component.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = "  "
_WORDS = ("codec", "dtype", "shape", "reason", "role", "rule", "format", "such as")
"""Columns of words."""

_BREAKS = re.compile(r"[^.:/_]*[.:/_]?")
"""A piece of a name, up to the next separator."""


def number(value: float | None) -> str:
    """Three significant digits; a dash for nothing."""
    return "-" if value is None else f"{value:.3g}"


def shape_text(shape: Sequence[int]) -> str:
    """``4x8``, or ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, fold: bool = False) -> Table:
    """A table without lines: the first column and those of words to the left, numbers to the right.

    Nothing in its cells is markup. ``fold`` breaks long cells and moves all to the left.
    """
    table = Sheet(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for k, column in enumerate(columns):
        justify: JustifyMethod = "left" if fold or k == 0 or column in _WORDS else "right"
        table.add_column(column, justify=justify, no_wrap=not fold, overflow="fold" if fold else "ellipsis")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def show_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], *, fold: bool = False) -> None:
    """Print an empty line and a table, see ``make_table``."""
    console.print()
    console.print(make_table(columns, rows, fold=fold))


class Sheet(Table):
    """A ``rich`` table; the first column names the rows."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, or its rows as paragraphs."""
        widths = [max(map(cell_len, cells)) for cells in self._cells()]
        if sum(widths) + len(_GAP) * (len(widths) - 1) <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield Text("\n".join(self._paragraphs(options.max_width)))

    def _cells(self) -> list[list[str]]:
        """Text by column, the header first."""
        return [[str(column.header), *map(str, column.cells)] for column in self.columns]

    def _paragraphs(self, width: int) -> Iterator[str]:
        columns = self._cells()
        headers = [column[0] for column in columns]
        yield from wrap(headers[0], width)
        for row in range(1, len(columns[0])):
            yield from wrap(columns[0][row], width, first=_GAP, more=_GAP * 2)
            pairs = [
                f"{header} {column[row]}"
                for header, column in zip(headers[1:], columns[1:], strict=True)
                if column[row]
            ]
            yield from pack(pairs, width, indent=_GAP * 2)


def wrap(text: str, width: int, *, first: str = "", more: str = _GAP) -> Iterator[str]:
    """Lines of at most ``width`` columns, broken at blanks. A name longer than a line breaks after its separators.

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
    """The pieces of a text that stay together, each with the blank after it."""
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
    """Lines of ``items``, as many in a line as fit, with two blanks between them."""
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
