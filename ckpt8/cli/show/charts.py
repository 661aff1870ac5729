"""What a page of the report is made of: bars, histograms and lines as SVG, text, the style sheet, the page itself.

Bars are in per cent of the available width, so that text keeps its size. A histogram has axes with ticks and units, and
shows the figures of a bar under the pointer. The page has one column on a phone, and is light or dark as the reader's
system is. It loads nothing and runs nothing, and holds its facts as JSON, in the element ``ckpt8-report``.
"""

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ckpt8.checkpoint.replacing import no_checkpoint
from ckpt8.cli.show.tables import number
from ckpt8.core.files.atomic import AtomicFile, as_private_as
from ckpt8.core.text import percent, printable

LOG10_OF_2 = math.log10(2)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def text(value: object) -> str:
    """Any text as markup that shows it: it contains no tags, and no characters that reverse the text around it."""
    return escape(printable(str(value)), quote=True)


_WHOLE = re.compile(
    r"(?<![\w-])--[a-z][a-z-]*|(?:max )?\|Δ?\w\|(?: [\d.e+-]+)?"
    r"|(?<![\w#&.])\d[\d.,e+-]* (?:%|(?:[kMGT]?B|dB|bits|steps?)\b)"
)
"""An option, a magnitude, or a number with its unit."""


def prose(value: object) -> str:
    """Text as ``text`` makes it, in which no line ends inside an option, or between a number and its unit."""
    return _WHOLE.sub(r'<span class="whole">\g<0></span>', text(value))


def power(exponent: int) -> str:
    """A power of ten, such as 10⁻⁶."""
    return f"10{str(exponent).translate(_SUPERSCRIPTS)}"


def linear_ticks(top: float, most: int = 4) -> list[float]:
    """Round numbers from 0 to ``top`` or just above it: the last is the end of the axis."""
    if not top > 0:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(top / most))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10, 20) if size * factor * most >= top * (1 - 1e-9))
    return [step * k for k in range(math.ceil(top / step - 1e-9) + 1)]


def decades(low: float, high: float, most: int = 6) -> list[int]:
    """At most ``most`` exponents of powers of ten between ``low`` and ``high``, which are such exponents, too."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    return [exponent for exponent in range(first, last + 1) if exponent % step == 0]


TWO_BARS = "Where a row has two bars, the faint one is the original size and the other the stored size."

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
    return f'<svg height="{len(bars) * (_BAR + _GAP) - _GAP}" role="img" aria-label="bar">{"".join(parts)}</svg>'


class LogAxis:
    """A logarithmic axis over the whole width, from a power of ten to another, that holds all ``values`` above 0."""

    def __init__(self, values: Iterable[float]) -> None:
        self._low, self._high = _decades_around([value for value in values if value > 0] or [0.1, 1.0])
        self._ticks = [(self._place(tick), tick) for tick in decades(self._low, self._high, 7)]

    def _place(self, exponent: float) -> str:
        return f"{2 + 96 * (exponent - self._low) / (self._high - self._low):.3f}%"

    def dots(self, dots: Iterable[tuple[str, float, str]]) -> str:
        """Dots on one line: style, value, description. A value of 0 has no dot."""
        parts = [
            *(f'<line class="grid" x1="{place}" x2="{place}" y1="-6" y2="24"/>' for place, _ in self._ticks),
            *(
                f'<circle class="{css}" cx="{self._place(math.log10(value))}" cy="9" r="4.5">'
                f"<title>{text(words)}</title></circle>"
                for css, value, words in dots
                if value > 0
            ),
        ]
        return f'<svg height="18" role="img" aria-label="error">{"".join(parts)}</svg>'

    def labels(self) -> str:
        """The row above all others, with the numbers of the axis."""
        labels = "".join(
            f'<text x="{place}" y="13" text-anchor="middle">{power(tick)}</text>' for place, tick in self._ticks
        )
        return f'<div class="axis"><div><svg height="18" aria-hidden="true">{labels}</svg></div></div>'


def _decades_around(values: Iterable[float]) -> tuple[int, int]:
    """The exponents of the powers of ten around positive values, at least one decade."""
    exponents = [math.log10(value) for value in values]
    low = math.floor(min(exponents) - 1e-9)
    return low, max(low + 1, math.ceil(max(exponents) + 1e-9))


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


_WIDTH, _HEIGHT = 320, 196
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 314, 10, 152
_FAINTEST = -4
"""Exponent of ten of the smallest share, in per cent, that a histogram of magnitudes shows."""

Place = Callable[[float], float]


def magnitudes(pair: dict[str, Any], css: str, label: str) -> str:
    """The histogram of magnitudes of both sides of a pair; ``label`` names the quantity.

    Shares are on a logarithmic axis, since storage changes the tail.
    """
    sides = {name: _shares(pair[name]) for name in ("before", "after") if pair[name] is not None}
    drawn = {octave: share for side in sides.values() for octave, share in side.items() if share >= 10.0**_FAINTEST}
    if not drawn:
        return _frame(label, _notice("no value other than zero"))
    least = min(share for side in sides.values() for share in side.values() if share >= 10.0**_FAINTEST)
    low, high = min(drawn), max(drawn) + 1
    # At least eight octaves are drawn.
    short = max(0, 8 - (high - low))
    low, high = low - short // 2, high + short - short // 2
    floor = min(0, math.floor(math.log10(least) - 1e-9))
    x, y = _linear(low, high, _LEFT, _RIGHT), _linear(floor, 2, _BOTTOM, _TOP)
    marks = [(x(decade / LOG10_OF_2), power(decade)) for decade in decades(low * LOG10_OF_2, high * LOG10_OF_2)]
    body = [
        _axes(marks, [(y(share), f"{10.0**share:g} %") for share in range(floor, 3)], "magnitude"),
    ]
    for name, side in sides.items():
        heights = [max(floor, math.log10(side[at])) if at in side else floor for at in range(low, high)]
        outline = _steps(heights, low, x, y, floor)
        if name == "before":
            body.append(f'<path class="was" d="{outline}Z"/>')
        else:
            body.append(f'<path class="line {css}" d="{outline}"/>' if "before" in sides else _area(css, outline))
    for octave in range(low, high):
        if words := [f"{name} {side[octave]:.3g} %" for name, side in sides.items() if octave in side]:
            reach = f"{2.0**octave:.2g} to {2.0 ** (octave + 1):.2g}"
            body.append(_hover_area(x(octave), x(octave + 1), f"{reach}: {', '.join(words)}"))
    return _frame(label, "".join(body))


def code_usage(row: dict[str, Any], css: str, axis: str) -> str:
    """How often the tensors use every code, in per cent of their values."""
    counts, first, total = row["counts"], row["first"], max(row["total"], 1)
    shares = [100 * count / total for count in counts]
    ticks, last = linear_ticks(max(shares)), first + len(counts) - 1
    x, y = _linear(first - 0.5, last + 0.5, _LEFT, _RIGHT), _linear(0, ticks[-1], _BOTTOM, _TOP)
    marks = [(x(mark), str(mark)) for mark in sorted({round(first + (last - first) * k / 4) for k in range(5)})]
    body = [
        _axes(marks, [(y(tick), f"{tick:.6g} %") for tick in ticks], axis),
        _area(css, _steps(shares, first - 0.5, x, y)),
        *(
            _hover_area(x(code - 0.5), x(code + 0.5), f"code {code}: {count:,} ({percent(count, total)})")
            for code, count in enumerate(counts, first)
        ),
    ]
    return _frame(axis, "".join(body))


def _area(css: str, outline: str) -> str:
    return f'<path class="area {css}" d="{outline}Z"/><path class="line {css}" d="{outline}"/>'


def by_step(values: Sequence[float | None], css: str, label: str) -> str:
    """A figure after every step, from step 1 on, on a logarithmic axis. Only positive figures have a point."""
    points = [(step, value, f"step {step:,}: {number(value)}") for step, value in enumerate(values, 1) if value]
    if not points:
        return _frame(label, _notice("zero after every step"))
    places = log_axis([value for _, value, _ in points])
    return over_steps([(css, points)], label, places, steps=(1, len(values)))


class Axis(NamedTuple):
    """Where a value lies, and the ticks: place and label."""

    place: Place
    ticks: Sequence[tuple[float, str]]


def log_axis(values: Sequence[float], label: Callable[[int], str] = power) -> Axis:
    """A logarithmic axis for positive values; ``label`` writes a power of ten."""
    low, high = _decades_around(values)
    y = _linear(low, high, _BOTTOM, _TOP)
    return Axis(lambda value: y(math.log10(value)), [(y(decade), label(decade)) for decade in decades(low, high, 5)])


def close_axis(values: Sequence[float]) -> Axis:
    """A linear axis from about the smallest to about the largest value."""
    low, high = min(values), max(values)
    step = linear_ticks(max(high - low, abs(high) * 1e-3, 1e-12))[1]
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    y = _linear(first * step, last * step, _BOTTOM, _TOP)
    return Axis(y, [(y(k * step), f"{k * step:.6g}") for k in range(first, last + 1)])


def over_steps(
    curves: Sequence[tuple[str, Sequence[tuple[int, float, str]]]],
    label: str,
    axis: Axis,
    *,
    steps: tuple[int, int] | None = None,
    joined: bool = True,
) -> str:
    """Points at steps, ``joined`` by lines; ``label`` names the quantity.

    A curve is a style, and its points in order: step, value, description.
    """
    all_steps = [step for _, points in curves for step, _, _ in points]
    first, last = steps or (min(all_steps), max(all_steps))
    last = max(first + 1, last)
    x = _linear(first, last, _LEFT + 6, _RIGHT - 6)
    body = [_axes([(x(step), f"{step:,}") for step in _marks(first, last)], axis.ticks, "step")]
    for css, points in curves:
        # Some 300 points are enough.
        thin = list(points[:: max(1, len(points) // 300)])
        thin += [points[-1]] if thin[-1] != points[-1] else []
        places = [(x(step), axis.place(value), words) for step, value, words in thin]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in places)
        body += [f'<polyline class="line {css}" points="{line}"/>'] if joined else []
        body += [
            f'<circle class="{css}" cx="{px:.1f}" cy="{py:.1f}" r="2.5"><title>{text(words)}</title></circle>'
            for px, py, words in places
        ]
    return _frame(label, "".join(body))


def _marks(first: int, last: int) -> Sequence[int]:
    """At most five round steps from the first to the last."""
    step = max(1, math.ceil(linear_ticks(last - first)[1]))
    return range(-(-first // step) * step, last + 1, step)


def _shares(side: dict[str, Any]) -> dict[int, float]:
    """Per cent of all values, zeros among them, by octave."""
    return {side["first"] + k: 100 * count / side["total"] for k, count in enumerate(side["counts"]) if count}


def _linear(low: float, high: float, start: float, stop: float) -> Place:
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def _steps(heights: Sequence[float], first: float, x: Place, y: Place, floor: float = 0) -> str:
    """The outline of bars from the axis, at the height ``floor``, and back to it."""
    bars = "".join(f"V{y(height):.1f}H{x(first + k + 1):.1f}" for k, height in enumerate(heights))
    return f"M{x(first):.1f} {y(floor):.1f}{bars}V{y(floor):.1f}"


def _hover_area(left: float, right: float, words: str) -> str:
    """An invisible bar that shows ``words`` under the pointer."""
    place = f'x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{_BOTTOM - _TOP}"'
    return f'<rect class="hit" {place}><title>{text(words)}</title></rect>'


def _axes(x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]], title: str) -> str:
    """Both axes. ``title`` is that of the horizontal one; the caption of the figure is that of the other."""
    parts = []
    for place, label in y_ticks:
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>',
            f'<text x="{_LEFT - 5}" y="{place + 3.5:.1f}" text-anchor="end">{text(label)}</text>',
        ]
    for place, label in x_ticks:
        anchor = "end" if place > _RIGHT - 12 else "middle"
        parts += [
            f'<line class="base" x1="{place:.1f}" x2="{place:.1f}" y1="{_BOTTOM}" y2="{_BOTTOM + 4}"/>',
            f'<text x="{place:.1f}" y="{_BOTTOM + 17}" text-anchor="{anchor}">{text(label)}</text>',
        ]
    return (
        f'{"".join(parts)}<line class="base" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>'
        f'<text x="{(_LEFT + _RIGHT) / 2:.1f}" y="{_HEIGHT - 7}" text-anchor="middle">{text(title)}</text>'
    )


def _notice(words: str) -> str:
    return f'<text x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle">{text(words)}</text>'


def _frame(label: str, body: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(label)}">{body}</svg>'


STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b1f24;--soft:#5a636e;--line:#dfe3e8;--grid:#e9ecf0;
--weight:#2f6bd8;--moment1:#0b8a7f;--moment2:#c96a12;--update:#8a45c4;--other:#5f6a76;--structure:#7d8894;--file:#87909b;
--before:#b4bcc6;--alarm:#b3261e}
@media (prefers-color-scheme:dark){:root{--page:#111418;--card:#1a1e24;--ink:#e7eaee;--soft:#a0a9b4;--line:#2d333b;
--grid:#272d35;--weight:#6ea1ff;--moment1:#36c2b4;--moment2:#f2a04e;--update:#c08cf2;--other:#a5aeb9;--structure:#87919c;
--file:#6f7985;--before:#4d5661;--alarm:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,Roboto,sans-serif;
-webkit-text-size-adjust:100%;font-variant-numeric:tabular-nums}
main{max-width:1000px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.3rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 4px}
h3{font-size:1rem;margin:20px 0 6px}
h1,h2,h3{text-wrap:balance}
p{margin:0 0 10px}
.soft,.note,figcaption span{color:var(--soft)}
.note{font-size:.82rem;margin:4px 0 0}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px;margin-top:16px;min-width:0}
code,.name{overflow-wrap:anywhere}
.whole{white-space:nowrap}
.tiles{display:flex;flex-wrap:wrap;gap:12px clamp(14px,4vw,64px);margin-bottom:14px}
.tile b{display:block;font-size:clamp(1.15rem,4.7vw,2.2rem);line-height:1.2;font-weight:650;white-space:nowrap}
.tile span{color:var(--soft);font-size:.85rem}
.lead{font-size:1.05rem}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;margin:2px 0 10px;font-size:.85rem;color:var(--soft)}
.key span{display:inline-flex;align-items:center;gap:6px}
.key svg{flex:none}
.row{display:grid;grid-template-columns:1fr auto;grid-template-areas:"name value" "bar bar";gap:1px 12px;
padding:5px 0;border-top:1px solid var(--grid);align-items:center}
.row:first-of-type{border-top:0}
.row>.name{grid-area:name;min-width:0;font-size:.9rem}
.row>.value{grid-area:value;text-align:right;font-size:.85rem;white-space:nowrap}
.row>.value small{color:var(--soft);font-size:inherit;display:block}
.row>.bar{grid-area:bar;min-width:0}
.row svg,.axis svg{display:block;width:100%;overflow:visible}
.axis{padding-top:2px}
@media (min-width:760px){.row,.axis{display:grid;grid-template-columns:minmax(120px,250px) minmax(0,1fr) 200px;
grid-template-areas:"name bar value";gap:0 14px}.axis>*{grid-area:bar}
.row>.value small{display:inline}}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,280px),1fr));gap:18px 16px;margin-top:10px}
figure{margin:0;min-width:0;max-width:500px}
@media (min-width:820px){.pairs{grid-template-columns:1fr 1fr}.pairs svg text{font-size:8.5px}}
figure svg{display:block;width:100%;height:auto}
figcaption{font-size:.9rem;font-weight:600}
figcaption span{font-weight:400}
svg text{fill:var(--soft);font-size:11.5px;font-family:inherit}
svg .grid{stroke:var(--grid);stroke-width:1}
svg .base{stroke:var(--soft);stroke-width:1}
svg .hit{fill:transparent}
svg .hit:hover{fill:var(--ink);fill-opacity:.08}
svg .was{fill:var(--before);stroke:var(--structure)}
svg .line{fill:none;stroke-width:1.75;stroke-linejoin:round}
.weight{fill:var(--weight);stroke:var(--weight)}.moment1{fill:var(--moment1);stroke:var(--moment1)}
.moment2{fill:var(--moment2);stroke:var(--moment2)}.update{fill:var(--update);stroke:var(--update)}
.other{fill:var(--other);stroke:var(--other)}.structure{fill:var(--structure);stroke:var(--structure)}
.file{fill:var(--file);stroke:var(--file)}.total{fill:var(--soft);stroke:var(--soft)}
svg .area{fill-opacity:.16;stroke:none}
svg rect:not(.was),svg .area{stroke:none!important}
svg .faint{fill-opacity:.42}
svg .ring{fill:var(--card);stroke-width:2}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th{font-weight:600;text-align:left}
td,th{padding:5px 0;border-top:1px solid var(--grid);vertical-align:top}
tr:first-child>*{border-top:0}
.terms{margin-bottom:14px}
.terms th{width:9.5rem;padding-right:12px;color:var(--soft);font-weight:400}
.terms td{overflow-wrap:anywhere}
#readiness .terms th{width:4.6rem}
.wide{overflow-x:auto}
.figures{width:auto;min-width:min(100%,620px)}
section>:last-child{margin-bottom:0}
.figures td,.figures th+th{padding-left:14px;text-align:right}
.figures td{white-space:nowrap}
.figures .word{text-align:left}
.figures thead th{color:var(--soft);font-weight:400;font-size:.82rem;line-height:1.25;vertical-align:bottom}
.figures tbody tr:first-child>*{border-top:1px solid var(--line)}
.figures tbody th{font-weight:400}
.sum tbody tr:last-child>*{border-top:1px solid var(--soft);font-weight:650}
@media (max-width:560px){section{padding:14px}.terms th{width:6.4rem}.figures{font-size:.8rem}
.figures td,.figures th+th{padding-left:8px}.figures thead th{font-size:.75rem}}
details{border-top:1px solid var(--grid);padding:6px 0}
li details{border:0;padding:0}
li+li{margin-top:6px}
summary{cursor:pointer}
summary .name{word-break:break-all}
summary .soft{display:block;font-size:.88rem}
.alarm{color:var(--alarm)}
ul{margin:6px 0;padding-left:20px}
li,p,h2,h3,figcaption{overflow-wrap:anywhere}
footer{color:var(--soft);font-size:.82rem;margin-top:18px}
@media print{section{break-inside:avoid}}
"""


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Even if a name got through as markup, the browser would neither run nor load anything."""


def document(title: str, sections: Iterable[str], data: dict[str, Any]) -> str:
    """The whole document of ``sections``, with ``data`` in it."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{text(title)} · ckpt8</title><style>{STYLE}</style></head>\n'
        f"<body><main>{''.join(sections)}</main>\n"
        f'<script type="application/json" id="ckpt8-report">{_embedded(data)}</script></body></html>\n'
    )


def _embedded(tree: Any) -> str:
    """JSON in which nothing is markup."""
    return json.dumps(tree, allow_nan=False, ensure_ascii=True, separators=(",", ":")).translate(
        {ord(character): f"\\u{ord(character):04x}" for character in "&<>"}
    )


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Figures in large type: the name and the value of each."""
    items = "".join(f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for name, value in pairs)
    return f'<div class="tiles">{items}</div>'


Row = tuple[str, Sequence[str]]
"""The name of a row and its phrases."""


def terms(rows: Iterable[Row]) -> str:
    """Rows of a name and what is to say of it; empty without rows."""
    items = "".join(
        f"<tr><th>{text(name)}</th><td>{', '.join(f'<span>{prose(phrase)}</span>' for phrase in phrases)}</td></tr>"
        for name, phrases in rows
    )
    return items and f'<table class="terms"><tbody>{items}</tbody></table>'


_BREAK = re.compile(" (?=to |or )")


def table(
    name: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Container[str] = (),
    total: bool = False,
) -> str:
    """A table of figures, which scrolls where it is too wide; the first column has names, as those of ``words`` do.

    No line is broken inside a figure, but in an interval. The last row may be a ``total``.
    """
    styles = [' class="word"' if column in words else "" for column in columns]
    head, *body = (
        "".join(
            f"<{tag}{css}>{_BREAK.sub(' <wbr>', text(cell))}</{tag}>"
            for tag, css, cell in zip(["th", *[tags] * len(styles)], styles, cells, strict=False)
        )
        for tags, cells in (("th", columns), *(("td", row) for row in rows))
    )
    css, lines = "figures sum" if total else "figures", "".join(f"<tr>{line}</tr>" for line in body)
    return (
        f'<div class="wide"><table id="{name}" class="{css}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def bullets(items: Iterable[str]) -> str:
    """A list of markup; empty without items."""
    lines = "".join(f"<li>{item}</li>" for item in items)
    return lines and f"<ul>{lines}</ul>"


_OPEN_ROWS = 20


def long_list(rows: Sequence[str]) -> str:
    """Rows of markup, the first of them open, the others folded."""
    rest = rows[_OPEN_ROWS:]
    return "".join(rows[:_OPEN_ROWS]) + (folded(f"{len(rest):,} more", *rest) if rest else "")


def folded(summary: str, *parts: str) -> str:
    """What the reader opens by a click on its summary, both of them markup."""
    return f"<details><summary>{summary}</summary>{''.join(parts)}</details>"


def section(name: str, title: str, *parts: str) -> str:
    """A section of the page."""
    return f'<section id="{name}"><h2>{title}</h2>{"".join(parts)}</section>'


def figure(name: str, title: str, chart: str, note: str) -> str:
    """A chart with its title and a note, all of them markup; ``name`` is its kind."""
    return f'<figure data-chart="{name}"><figcaption>{title}</figcaption>{chart}<p class="note">{note}</p></figure>'


def charts(figures: Iterable[str], style: str = "charts") -> str:
    """Figures beside each other."""
    return f'<div class="{style}">{"".join(figures)}</div>'


class Page:
    """A page to write to ``target``.

    Raises OutputError if it cannot be written there, or what is there must stay: see ``no_checkpoint``.
    """

    def __init__(self, target: Path, *, force: bool) -> None:
        self._output = partial(AtomicFile, target, force=force, check=no_checkpoint)
        self._output().close()

    def write(self, content: str, sources: Iterable[Path]) -> None:
        """Write a page of what ``sources`` hold, which is not more open to others than they are. Raises as above."""
        with as_private_as(*sources), self._output() as output:
            with output.guard():
                output.file.write(content.encode())
            output.publish()
