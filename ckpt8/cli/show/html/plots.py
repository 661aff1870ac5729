"""Histograms and lines as SVG: axes with ticks and units, and the figures of a bar under the pointer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ckpt8.cli.show.html.text import LOG10_OF_2, decades, linear_ticks, power, text
from ckpt8.cli.show.tables import number
from ckpt8.core.text import percent

_WIDTH, _HEIGHT = 320, 212
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 314, 26, 168
_LEAST_OCTAVES = 8
_MOST_POINTS = 300
_FAINTEST = -4
"""Exponent of ten of the smallest share, in per cent, that a histogram of magnitudes shows."""

Place = Callable[[float], float]

_POWER = partial(power, 10)


def magnitudes(pair: dict[str, Any], css: str, axis: str) -> str:
    """The histogram of magnitudes of both sides of a pair; ``axis`` names the quantity.

    Shares are on a logarithmic axis, since storage changes the tail.
    """
    sides = [None if side is None else _shares(side) for side in (pair["before"], pair["after"])]
    drawn = [octave for side in sides if side for octave, share in side.items() if share >= 10.0**_FAINTEST]
    if not drawn:
        return _frame(axis, _notice("no value other than zero"))
    low, high = min(drawn), max(drawn) + 1
    short = max(0, _LEAST_OCTAVES - (high - low))
    low, high = low - short // 2, high + short - short // 2
    least = min(share for side in sides if side for octave, share in side.items() if share >= 10.0**_FAINTEST)
    floor = min(0, math.floor(math.log10(least) - 1e-9))
    x, y = _linear(low, high, _LEFT, _RIGHT), _linear(floor, 2, _BOTTOM, _TOP)
    marks = [(x(each / LOG10_OF_2), power(10, each)) for each in decades(low * LOG10_OF_2, high * LOG10_OF_2)]
    body = [_axes(marks, [(y(each), f"{10.0**each:g} %") for each in range(floor, 3)], axis, "share of values")]
    paths = [
        None
        if side is None
        else _steps(
            [max(floor, math.log10(side[each])) if each in side else floor for each in range(low, high)],
            low,
            x,
            y,
            floor,
        )
        for side in sides
    ]
    if paths[0] is not None:
        body.append(f'<path class="was" d="{paths[0]}Z"/>')
    body.append(f'<path class="area {css}" d="{paths[1]}Z"/><path class="line {css}" d="{paths[1]}"/>')
    for octave in range(low, high):
        words = [
            f"{name} {side[octave]:.3g} %"
            for name, side in zip(("before", "after"), sides, strict=True)
            if side and octave in side
        ]
        if words:
            reach = f"{2.0**octave:.2g} to {2.0 ** (octave + 1):.2g}"
            body.append(_hover_area(x(octave), x(octave + 1), f"{reach}: {', '.join(words)}"))
    return _frame(axis, "".join(body))


def code_usage(row: dict[str, Any], css: str, axis: str) -> str:
    """How often the tensors use every code."""
    counts, first, total = row["counts"], row["first"], max(row["total"], 1)
    shares = [100 * count / total for count in counts]
    ticks = linear_ticks(max(shares))
    x, y = _linear(first - 0.5, first + len(counts) - 0.5, _LEFT, _RIGHT), _linear(0, ticks[-1], _BOTTOM, _TOP)
    last = first + len(counts) - 1
    marks = sorted({round(first + (last - first) * k / 4) for k in range(5)})
    body = [
        _axes(
            [(x(each), str(each)) for each in marks],
            [(y(t), f"{t:.6g} %") for t in ticks],
            axis,
            "share of values with each code",
        )
    ]
    outline = _steps(shares, first - 0.5, x, y)
    body.append(f'<path class="area {css}" d="{outline}Z"/><path class="line {css}" d="{outline}"/>')
    for k, count in enumerate(counts):
        left = x(first + k - 0.5)
        body.append(_hover_area(left, x(first + k + 0.5), f"code {first + k}: {count:,} ({percent(count, total)})"))
    return _frame(axis, "".join(body))


def by_step(values: Sequence[float | None], css: str, axis: str) -> str:
    """A figure after every step, from step 1 on, on a logarithmic axis. Only positive figures have a point."""
    known = [(step, value) for step, value in enumerate(values, 1) if value is not None and value > 0]
    if not known:
        return _frame(axis, _notice("zero after every step"))
    points = [(step, value, f"step {step:,}: {number(value)}") for step, value in known]
    axis_of_values = log_axis([value for _, value in known])
    return over_steps([(css, points)], "replayed step", axis, axis_of_values, steps=(1, len(values)))


class Axis(NamedTuple):
    """Where a value lies, and the ticks: place and label."""

    place: Place
    ticks: Sequence[tuple[float, str]]


def log_axis(values: Sequence[float], label: Callable[[int], str] = _POWER) -> Axis:
    """A logarithmic axis for positive values; ``label`` writes a power of ten."""
    exponents = [math.log10(value) for value in values]
    low = math.floor(min(exponents) - 1e-9)
    high = max(low + 1, math.ceil(max(exponents) + 1e-9))
    y = _linear(low, high, _BOTTOM, _TOP)
    return Axis(lambda value: y(math.log10(value)), [(y(each), label(each)) for each in decades(low, high, 5)])


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
    x_title: str,
    y_title: str,
    axis: Axis,
    *,
    steps: tuple[int, int] | None = None,
    joined: bool = True,
) -> str:
    """Points at steps, ``joined`` by lines; a curve is a style, and its points in order: step, value, description."""
    found = [step for _, points in curves for step, _, _ in points]
    first, last = steps or (min(found), max(found))
    last = max(first + 1, last)
    x = _linear(first, last, _LEFT + 6, _RIGHT - 6)
    body = [_axes([(x(step), f"{step:,}") for step in _marks(first, last)], axis.ticks, x_title, y_title)]
    for css, points in curves:
        thin = list(points[:: max(1, len(points) // _MOST_POINTS)])
        thin += [points[-1]] if thin[-1] != points[-1] else []
        places = [(x(step), axis.place(value), words) for step, value, words in thin]
        if joined:
            line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in places)
            body.append(f'<polyline class="line {css}" points="{line}"/>')
        body += [
            f'<circle class="{css}" cx="{px:.1f}" cy="{py:.1f}" r="2.5"><title>{text(words)}</title></circle>'
            for px, py, words in places
        ]
    return _frame(y_title, "".join(body))


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
    path = [f"M{x(first):.1f} {y(floor):.1f}"]
    path += [f"V{y(height):.1f}H{x(first + k + 1):.1f}" for k, height in enumerate(heights)]
    return "".join(path) + f"V{y(floor):.1f}"


def _hover_area(left: float, right: float, words: str) -> str:
    """An invisible bar that shows ``words`` under the pointer."""
    place = f'x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{_BOTTOM - _TOP}"'
    return f'<rect class="hit" {place}><title>{text(words)}</title></rect>'


def _axes(
    x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]], x_title: str, y_title: str
) -> str:
    parts = []
    for place, label in y_ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{place + 3.5:.1f}" text-anchor="end">{text(label)}</text>')
    for place, label in x_ticks:
        parts.append(f'<line class="base" x1="{place:.1f}" x2="{place:.1f}" y1="{_BOTTOM}" y2="{_BOTTOM + 4}"/>')
        anchor = "end" if place > _RIGHT - 12 else "middle"
        parts.append(f'<text x="{place:.1f}" y="{_BOTTOM + 17}" text-anchor="{anchor}">{text(label)}</text>')
    parts.append(f'<line class="base" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>')
    parts.append(f'<text x="{(_LEFT + _RIGHT) / 2:.1f}" y="{_HEIGHT - 7}" text-anchor="middle">{text(x_title)}</text>')
    parts.append(f'<text x="2" y="12">{text(y_title)}</text>')
    return "".join(parts)


def _notice(words: str) -> str:
    return f'<text x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle">{text(words)}</text>'


def _frame(label: str, body: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(label)}">{body}</svg>'
