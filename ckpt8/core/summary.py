"""How results print: a few short lines, and in a notebook a small table."""

from collections.abc import Iterable
from html import escape

from ckpt8.core.text import printable, shortened, size

_MOST_ROWS, _LONGEST = 6, 140


class Summarised:
    """Base of results. Names from files are escaped, and long ones are cut."""

    __slots__ = ()

    def _summary(self) -> Iterable[tuple[str, str]]:
        """Labels and texts, what it is first; a row without text is not shown."""
        raise NotImplementedError

    def _rows(self) -> list[tuple[str, str]]:
        rows = [(label, shortened(printable(text), _LONGEST)) for label, text in self._summary() if text]
        return rows[:_MOST_ROWS]

    def __repr__(self) -> str:
        rows = self._rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)

    def _repr_html_(self) -> str:
        cells = (f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in self._rows())
        return f"<table>{''.join(cells)}</table>"


def shrunk(before: float, after: float) -> str:
    """Sizes before and after, and the ratio: ``3.3 times smaller``."""
    return f"{size(before)} -> {size(after)}" + (f", {before / after:.2f} times smaller" if after else "")
