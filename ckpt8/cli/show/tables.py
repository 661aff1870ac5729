"""Tables and bars for any width: if the columns of a table do not fit, each row becomes a paragraph.

Both keep every cell whole and break long names after a component.

An error in steps of the optimizer, and the loss drift that it is expected to cost, are lines here as well.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ckpt8.cli.guard import is_verbose
from ckpt8.container.steps import PARTS, earlier_in_words, error_in_words, interval
from ckpt8.core.text import counted, percent, size

_GAP = "  "
_WORDS = (
    *("codec", "dtype", "shape", "reason", "role", "rule", "format", "such as"),
    *("kind", "base", "made with", "state", "becomes"),
)
"""Columns of words."""

_BLANK = re.compile(r"(?<!--rule) (?!(?<=\d )(?:%|(?:steps?|dB|[kMGT]?B|s)\b))")
"""A blank where a line may be broken: not one between a number and its unit, or an option to copy and its value."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LONGEST, _SHORTEST = 40, 8
"""Columns of a bar."""


def codec_text(name: str) -> str:
    """A codec without the sign of its codes, which follows from the role in the same row."""
    return name.replace("signed=False, ", "")


def number(value: float | None) -> str:
    """Three significant digits; a dash for nothing."""
    return "-" if value is None else f"{value:.3g}"


def shape_text(shape: Sequence[int]) -> str:
    """``4x8``, or ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


class Table:
    """A table without lines for a console: the first column and those of words to the left, numbers to the right.

    Nothing in its cells is markup. ``left`` moves all columns to the left.
    """

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: bool = False) -> None:
        self._rows = [columns, *rows]
        self._left = [left or k == 0 or column in _WORDS for k, column in enumerate(columns)]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, or its rows as paragraphs."""
        widths = [max(map(cell_len, column)) for column in zip(*self._rows, strict=True)]
        if sum(widths) + len(_GAP) * (len(widths) - 1) > options.max_width:
            yield Text("\n".join(self._paragraphs(options.max_width)))
            return
        header, *lines = (_GAP.join(map(_pad, row, widths, self._left)) for row in self._rows)
        yield Text(header, style="bold")
        if lines:
            yield Text("\n".join(lines))

    def _paragraphs(self, width: int) -> Iterator[str]:
        (title, *headers), *rows = self._rows
        yield from wrap(title, width)
        for name, *cells in rows:
            yield from wrap(name, width, first=_GAP, more=_GAP * 2)
            pairs = [f"{header} {cell}" for header, cell in zip(headers, cells, strict=True) if cell]
            yield from pack(pairs, width, indent=_GAP * 2)


def _pad(cell: str, width: int, left: bool) -> str:
    blanks = " " * (width - cell_len(cell))
    return cell + blanks if left else blanks + cell


def show_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: bool = False) -> None:
    """Print an empty line and a table, see ``Table``."""
    console.print()
    console.print(Table(columns, rows, left=left))


def say(console: Console, *texts: str, style: str = "", indent: str = "", hang: int = len(_GAP)) -> None:
    """Print texts without markup, each broken between words at the width of the terminal.

    Lines after the first of a text stand ``hang`` columns to the right of it.
    """
    for text in texts:
        lines = wrap(text, console.width, first=indent, more=indent + " " * hang)
        console.print(Text("\n".join(lines), style=style), soft_wrap=True)


def wrap(text: str, width: int, *, first: str = "", more: str = _GAP) -> Iterator[str]:
    """Lines of at most ``width`` columns, broken at blanks, though not between a number and its unit.

    A name longer than a line breaks after its separators. A line has at least one character beside its indentation,
    however small ``width`` is. ``first`` stands before the first line, ``more`` before the others.
    """
    line, is_empty = first, True
    for part in _parts(text, max(width - cell_len(more), 1)):
        if not is_empty and cell_len(line) + cell_len(part.rstrip()) > width:
            yield line.rstrip()
            line = more
        line, is_empty = line + part, False
    yield line.rstrip()


def _parts(text: str, width: int) -> Iterator[str]:
    """The pieces of a text that stay together, each with the blank after it."""
    for word in _BLANK.split(text):
        if cell_len(word) <= width:
            yield f"{word} "
            continue
        if " " in word:
            yield from (piece for half in word.split(" ") for piece in _parts(half, width))
            continue
        # A name breaks after its separators.
        *parts, last = filter(None, re.findall(r"[^.:/_]*[.:/_]?", word))
        for part in parts:
            yield from _cut(part, width)
        *pieces, end = _cut(last, width)
        yield from pieces
        yield f"{end} "


def _cut(text: str, width: int) -> Iterator[str]:
    """Pieces of at most ``width`` columns, or of one character that is wider."""
    start = used = 0
    for at, character in enumerate(text):
        columns = cell_len(character)
        if used + columns > width and at > start:
            yield text[start:at]
            start, used = at, 0
        used += columns
    yield text[start:]


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


class Share(NamedTuple):
    """One bar: its label, its fraction of the whole (0 to 1), and the figures behind it, a column each."""

    label: str
    fraction: float
    figures: tuple[str, ...]


def bar(fraction: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar of ``fraction`` of ``width`` columns, to an eighth of a column. Above zero it is never empty."""
    eighths = max(min(round(fraction * width * 8), width * 8), 1 if fraction > 0 else 0)
    if ascii_only:
        return "#" * (-(-eighths // 8) if eighths < 8 else round(eighths / 8))
    return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def bars(shares: Sequence[Share], width: int, *, ascii_only: bool = False) -> Iterator[str]:
    """Lines of at most ``width`` columns; a full bar is the largest share."""
    if not shares:
        return
    largest = max(share.fraction for share in shares) or 1.0
    sizes = [max(cell_len(share.figures[k]) for share in shares) for k in range(len(shares[0].figures))]
    behind = sum(sizes) + len(_GAP) * len(sizes)
    label = max(cell_len(share.label) for share in shares)
    room = width - label - len(_GAP) - behind
    one_line = room >= _SHORTEST
    length = min(_LONGEST, room if one_line else width - len(_GAP) - behind)
    for share in shares:
        drawn = bar(share.fraction / largest, max(length, 1), ascii_only=ascii_only) if length >= 4 else ""
        figures = "".join(_GAP + _pad(text, size, False) for text, size in zip(share.figures, sizes, strict=True))
        if one_line:
            yield _pad(share.label, label, True) + _GAP + drawn.ljust(length) + figures
        else:
            yield from wrap(share.label, width)
            yield _GAP + drawn.ljust(max(length, 0)) + figures


HANG = 14
"""Columns of the names before figures that were measured."""

HEALS = "this error fades: gradients renew the momentum within about ten steps, and the loss drift counts that"


def step_lines(steps: Mapping[str, Any]) -> list[str]:
    """The error in steps with its parts, what is not in it, and the loss drift; for reports with all figures."""
    whole, *parts = figure_phrases(steps) if steps["steps"] is not None else [""]
    lines = [
        *([f"steps         {whole}: {', '.join(parts)}"] if parts else []),
        *(f"steps         {phrase}" for phrase in outside_phrases(steps)),
        *(f"learning rate {phrase}" for phrase in rate_phrases(steps)),
        *(f"earlier       {phrase}" for phrase in earlier_phrases(steps)),
        f"loss drift    {drift_text(steps['drift'])}",
    ]
    if capped := steps["capped"]["elements"]:
        share = percent(capped, steps["capped"]["of"])
        lines.append(f"lattice       {share} of the weights have the largest step that their size allows")
    return lines


def error_line(steps: Mapping[str, Any] | None) -> str:
    """The verdict on an error; where it is not known in steps, it says how to see what is."""
    is_unknown = steps is not None and steps["steps"] is None and steps["changed"]["of"]
    return error_in_words(steps) + ("; -v shows what was measured" if is_unknown and not is_verbose() else "")


def warnings_of(steps: Mapping[str, Any] | None) -> list[str]:
    """What a line about the error in steps leaves out and nobody should miss; nothing where there is no figure."""
    if steps is None or steps["steps"] is None:
        return []
    excess = f"above the budget of {number(steps['budget'])} by {number(more)}" if (more := _excess(steps)) else ""
    return [*filter(None, (excess,)), *outside_phrases(steps)]


def steps_phrase(steps: Mapping[str, Any]) -> str:
    """The error in steps and its budget, if there is one, for a line about more than that."""
    known = "in steps unknown" if steps["steps"] is None else f"{number(steps['steps'])} steps"
    return " ".join(filter(None, ("error", known, _budget_phrase(steps))))


def _budget_phrase(steps: Mapping[str, Any]) -> str:
    """The budget, if there is one, and by how much the error exceeds it: three digits may hide that."""
    if steps["budget"] is None:
        return ""
    more = f", exceeded by {number(excess)}" if (excess := _excess(steps)) else ""
    return f"(budget {number(steps['budget'])}{more})"


def _excess(steps: Mapping[str, Any]) -> float:
    """By how much the error exceeds the budget, beyond the rounding of sums; else 0."""
    more = 0.0 if None in (steps["budget"], steps["steps"]) else steps["steps"] - steps["budget"]
    return more if more > 1e-6 else 0.0


def fallback_phrase(steps: Mapping[str, Any]) -> str | None:
    """What is not stored under the budget, and why; None where all is."""
    rows = [f"{counted(row['count'], 'storage')}, {row['reason']}" for row in steps["fallbacks"]]
    return f"under no budget: {'; '.join(rows)}" if rows else None


def measured_lines(steps: Mapping[str, Any]) -> list[str]:
    """Lines about weights and updates, then those of ``step_lines``."""
    if steps["steps"] is None:
        return step_lines(steps)
    snr, heals = steps["weight_snr_db"], healing_line({"nmse": steps["update_nmse"]}, steps)
    return [
        *([] if snr is None else [f"weights       SNR {number(snr)} dB"]),
        f"update space  NMSE {number(steps['update_nmse'])}, max |Δu| {number(steps['max_error'])}",
        *([f"              {heals}"] if heals else []),
        *step_lines(steps),
    ]


def drift_text(drift: Mapping[str, float] | None) -> str:
    """The expected loss drift and its interval."""
    if drift is None:
        return "not predicted"
    if not drift["mean"]:
        return "none"
    return f"{number(drift['mean'])} expected, {interval(drift)}"


def healing_line(update: Mapping[str, Any] | None, steps: Mapping[str, Any] | None) -> str | None:
    """Why an update with an NMSE of 0.01 or more resumes well; None where there is nothing to explain."""
    nmse = None if update is None or steps is None else update["nmse"]
    return HEALS if nmse is not None and nmse >= 0.01 else None


def figure_phrases(steps: Mapping[str, Any]) -> list[str]:
    """A known error in steps, the budget, over what it is, and its parts."""
    whole = " ".join(filter(None, (number(steps["steps"]), _budget_phrase(steps))))
    return [f"{whole} over {counted(steps['parameters'], 'parameter')}", *part_phrases(steps)]


def earlier_phrases(steps: Mapping[str, Any]) -> list[str]:
    """What is stated of earlier compressions."""
    own = steps["steps"] if steps["changed"]["of"] else 0.0
    return [f"after {earlier_in_words(own, steps['earlier'])}"] if "earlier" in steps else []


def outside_phrases(steps: Mapping[str, Any]) -> list[str]:
    """What is not in an error in steps, or that it is unknown of all that changed."""
    word, of = "not counted:" if steps["steps"] is not None else "unknown for", steps["changed"]["of"]
    return [
        f"{word} {counted(row['count'], 'tensor')}, {percent(row['elements'], of)} of what changed: {row['reason']}"
        for row in steps["outside"]
    ]


def rate_phrases(steps: Mapping[str, Any]) -> list[str]:
    """The learning rates that an error counts with; all that the file states in one phrase."""
    stated = ", ".join(number(rate["rate"]) for rate in steps["rates"] if rate["rate"] == rate["stated"])
    others = [
        f"{number(rate['rate'])} for {counted(rate['parameters'], 'parameter')}, a tenth of the initial rate: the file "
        f"has {number(rate['stated'])}"
        for rate in steps["rates"]
        if rate["rate"] != rate["stated"]
    ]
    return [stated, *others] if stated else others


def part_phrases(steps: Mapping[str, Any]) -> list[str]:
    """The three parts of an error in steps, each with its name."""
    return [f"{words} {number(steps[part])}" for part, words in PARTS.items()]


Cells = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The columns and the rows of a table."""


def optimizer_table(steps: Mapping[str, Any] | None) -> Cells:
    """The error by optimizer; no rows unless there are several."""
    figures = {
        "steps": "steps",
        **PARTS,
        "weight_snr_db": "weights' SNR",
        "max_error": "max |Δu|",
        "update_nmse": "NMSE of u",
    }
    several = steps["optimizers"] if steps and len(steps["optimizers"]) > 1 else []
    return ("optimizer of", *figures.values(), "expected loss drift"), [
        (counted(row["parameters"], "parameter"), *(number(row[key]) for key in figures), interval(row["drift"]))
        for row in several
    ]


def show_optimizers(console: Console, steps: Mapping[str, Any] | None) -> None:
    """Print the error by optimizer, if there are several."""
    columns, rows = optimizer_table(steps)
    if rows:
        show_table(console, columns, rows)


def prediction_rows(facts: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """What every preset and some budgets would make of a checkpoint: option, size, ratio, error in steps, drift."""
    return [
        (
            option_of(name),
            size(prediction["bytes"]),
            f"{prediction['ratio']:.2f}x",
            number(prediction["steps"]),
            interval(prediction["drift"]),
        )
        for name, prediction in facts["predicted"].items()
    ]


def show_predictions(console: Console, facts: Mapping[str, Any]) -> None:
    """Print what every preset and some budgets would make of a checkpoint."""
    console.print(Table(("option", "size", "ratio", "steps", "expected loss drift"), prediction_rows(facts)))
    outside = facts["unpredicted"].items()
    say(console, *(f"not in steps: {counted(count, 'tensor')}: {reason}" for reason, count in outside))


NO_TENSORS = "It holds no tensors; there is nothing to compress"
"""In place of predictions."""


def option_of(name: str) -> str:
    """The option of ``compress`` that a prediction is about."""
    return f"--{name}" if name.startswith("budget ") else f"--preset {name}"
