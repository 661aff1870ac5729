"""Shows the checkpoints of a run: in a terminal, and on the page of ``runs --html`` with sizes and loss by step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console

from ckpt8 import __version__
from ckpt8.cli.guard import is_verbose
from ckpt8.cli.show.charts import (
    TWO_BARS,
    Axis,
    charts,
    close_axis,
    document,
    figure,
    legend,
    log_axis,
    over_steps,
    row,
    section,
    stacks,
    text,
    tiles,
)
from ckpt8.cli.show.tables import Table, number, say, show_table
from ckpt8.core.grouping import grouped
from ckpt8.core.text import counted, printable_tree, size

Row = Mapping[str, Any]


def show(console: Console, facts: Mapping[str, Any]) -> None:
    """Print ``Run.to_json``; escape unprintable characters of names.

    Columns without a value are left out, and unless ``--verbose`` those of ``_DETAILS`` that tell no rows apart.
    """
    facts = printable_tree(facts)
    rows: Sequence[Row] = facts["checkpoints"]
    cells = {title: [cell(row) for row in rows] for title, cell in _COLUMNS}
    alike = {} if is_verbose() else {title: cells.pop(title) for title, is_plain in _DETAILS.items() if is_plain(rows)}
    say(console, ", ".join((facts["path"], *dict.fromkeys(filter(None, alike.get("made with", []))))), style="bold")
    shown = {title: column for title, column in cells.items() if any(column)}
    console.print(Table(("checkpoint", *shown), list(zip((row["name"] for row in rows), *shown.values(), strict=True))))
    if damaged := [(row["name"], row["damage"]) for row in rows if row["damage"] is not None]:
        show_table(console, ("damaged", "reason"), damaged)
    console.print()
    say(console, *total_lines(facts["totals"]), *room_lines(facts))


def room_lines(facts: Mapping[str, Any]) -> list[str]:
    """How the room of a run grows, and what ``thin`` would save by its rule ``log``; none for a few checkpoints."""
    rows, log = facts["checkpoints"], facts["keep_log"]
    steps = sorted({row["step"] for row in rows if row["step"] is not None})
    taken = [row["stored_bytes"] + row["raw_bytes"] for row in rows]
    if len(steps) < 2 or log["stay"] == len(rows):
        return []
    every = size(sum(taken) / len(taken) * (len(steps) - 1) / (steps[-1] - steps[0]) * 1000)
    keeps = f"keep {log['stay']:,} checkpoints, and free {size(sum(taken) - log['bytes'])}"
    return [f"it grows by {every} in 1,000 steps; ckpt8 thin --keep log would {keeps}"]


def total_lines(totals: Mapping[str, Any]) -> list[str]:
    """What there is of each kind, and its bytes."""
    words = {kind: counted(totals[kind], kind) for kind in ("key", "delta")} | {"raw": f"{totals['raw']:,} raw"}
    kinds = [phrase for kind, phrase in words.items() if totals[kind]]
    line = f"{counted(totals['checkpoints'], 'checkpoint')}: {', '.join(kinds)}" if kinds else "no whole checkpoint"
    sizes = size(totals["stored_bytes"])
    if totals["ratio"] is not None:
        sizes = f"{size(totals['bytes'])} -> {sizes}, {totals['ratio']:.2f}x"
        sizes += " without the raw ones" if totals["raw"] else ""
    lines = [f"{line}; {sizes}"]
    if totals["packed_and_raw"]:
        lines.append(f"{totals['packed_and_raw']:,} of them raw as well, which takes {size(totals['raw_bytes'])} more")
    if totals["bases_bytes"]:
        lines.append(f"{size(totals['bases_bytes'])} of it in bases/, for deltas; --release frees what none needs")
    counts = ("damaged", totals["damaged"]), ("without a base", totals["base_missing"])
    if problems := [f"{count:,} {what}" for what, count in counts if count]:
        lines.append(", ".join(problems))
    return lines


def state(row: Row) -> str:
    """Whether the file holds, in a word or two."""
    if row["damage"] is not None:
        return "damaged"
    if row["base"] == "missing":
        return "no base"
    return "" if row["kind"] == "raw" else "sealed"


def local_time(time: str) -> str:
    """A time in the zone of the reader, to the minute."""
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}"


def _known(value: float | None) -> str:
    return "" if value is None else number(value)


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("step", lambda row: "" if row["step"] is None else f"{row['step']:,}"),
    ("loss", lambda row: _known(row["loss"])),
    ("val. loss", lambda row: _known(row["val_loss"])),
    ("size", lambda row: size(row["stored_bytes"])),
    ("ratio", lambda row: "" if row["ratio"] is None else f"{row['ratio']:.2f}x"),
    ("error", lambda row: "" if row["steps"] is None else f"{number(row['steps'])} steps"),
    ("kind", lambda row: " + ".join(filter(None, (row["kind"], row["raw"] and "raw")))),
    ("base", lambda row: row["base"] or ""),
    ("made with", lambda row: row["asked"] or ""),
    ("state", state),
    ("saved", lambda row: local_time(row["time"])),
)
"""The title and the text of every column but the name."""

_DETAILS: Mapping[str, Callable[[Sequence[Row]], bool]] = {
    "made with": lambda rows: len({row["asked"] for row in rows} - {None}) <= 1,
    "state": lambda rows: {state(row) for row in rows} <= {"", "sealed"},
    "saved": lambda rows: all(row["step"] is not None for row in rows),
}
"""The columns that say nothing new of some runs, and when: all alike, all sealed, the order known from the steps."""

_KINDS = {"key": "weight", "delta": "moment2", "raw": "other"}
"""The style of every kind."""

_WORDS = {"key": "key", "delta": "delta", "raw": "not compressed"}
_LOSSES = {"loss": ("update", "training loss"), "val_loss": ("moment1", "validation loss")}

Point = tuple[int, float, str]


def page(facts: Mapping[str, Any]) -> str:
    """The page about ``Run.to_json``."""
    name, rows = facts["path"].rstrip("/").rpartition("/")[2] or facts["path"], facts["checkpoints"]
    sections = (
        _heading(name, facts["totals"]),
        _charts(rows),
        _list(rows),
        f"<footer><p>Read from the heads of the files. ckpt8 {text(__version__)}</p></footer>",
    )
    return document(name, sections, {"facts": facts})


def _heading(name: str, totals: Mapping[str, Any]) -> str:
    shown = [
        ("checkpoints", f"{totals['checkpoints']:,}"),
        ("on disk", size(totals["stored_bytes"] + totals["raw_bytes"])),
    ]
    if totals["ratio"] is not None:
        shown += [("originals", size(totals["bytes"])), ("ratio", f"{totals['ratio']:.2f}x")]
    problems = ("damaged", totals["damaged"]), ("without a base", totals["base_missing"])
    shown += [(what, f"{count:,}") for what, count in problems if count]
    words = "".join(f'<p class="soft">{text(line)}</p>' for line in total_lines(totals))
    return f"<header><h1>{text(name)}</h1>{words}{tiles(shown)}</header>"


def _charts(rows: Sequence[Row]) -> str:
    """The section of sizes and losses by step; empty where no step is known."""
    known = [checkpoint for checkpoint in rows if checkpoint["step"] is not None]
    entries: list[tuple[str, str]] = []
    figures = [*_sizes(known, entries), *_room(known), *_losses(known, entries)]
    return section("steps", "By step", legend(entries), charts(figures, "charts pairs")) if figures else ""


def _figure(name: str, title: str, chart: str, points: int) -> str:
    return figure(name, title, chart, f"{counted(points, 'point')}, those with a known step")


def _sizes(rows: Sequence[Row], entries: list[tuple[str, str]]) -> Iterator[str]:
    """The bytes of every checkpoint by its step, if there are any; adds the entries of the legend."""
    known = [checkpoint for checkpoint in rows if checkpoint["kind"] and checkpoint["stored_bytes"]]
    curves = []
    for kind, css in _KINDS.items():
        if points := [
            _point(checkpoint, checkpoint["stored_bytes"], size(checkpoint["stored_bytes"]))
            for checkpoint in known
            if checkpoint["kind"] == kind
        ]:
            curves.append((css, sorted(points)))
            entries.append((f"dot {css}", _WORDS[kind]))
    if known:
        axis = _size_axis([checkpoint["stored_bytes"] for checkpoint in known])
        yield _figure("sizes", "Size", over_steps(curves, "size", axis, joined=False), len(known))


def _room(rows: Sequence[Row]) -> Iterator[str]:
    """What the run takes up to each step, if it has several."""
    points, taken = list[Point](), 0
    for checkpoint in sorted(rows, key=lambda row: row["step"]):
        taken += checkpoint["stored_bytes"] + checkpoint["raw_bytes"]
        points.append(_point(checkpoint, taken, f"{size(taken)} up to here"))
    if len(points) > 1:
        axis = _size_axis([value for _, value, _ in points])
        yield _figure("room", "Room over time", over_steps([("weight", points)], "room", axis), len(points))


def _size_axis(values: Sequence[float]) -> Axis:
    return log_axis(values, lambda exponent: size(10**exponent).replace(".00", ""))


def _point(checkpoint: Row, value: float, words: str) -> Point:
    return checkpoint["step"], value, f"{checkpoint['name']}: step {checkpoint['step']:,}, {words}"


def _losses(rows: Sequence[Row], entries: list[tuple[str, str]]) -> Iterator[str]:
    """The losses by step, a line for each run, if there are any; adds the entries of the legend."""
    curves = []
    for key, (css, words) in _LOSSES.items():
        of_runs = grouped(
            (checkpoint["run"], _point(checkpoint, loss, f"loss {number(loss)}"))
            for checkpoint in rows
            if (loss := checkpoint[key]) is not None
        )
        curves += [(css, sorted(points)) for points in of_runs.values()]
        entries += [(f"dot {css}", words)] if of_runs else []
    if curves:
        values = [value for _, points in curves for _, value, _ in points]
        yield _figure("losses", "Loss", over_steps(curves, "loss", close_axis(values)), len(values))


def _list(rows: Sequence[Row]) -> str:
    full_bar = max(1, *(max(checkpoint["bytes"] or 0, checkpoint["stored_bytes"]) for checkpoint in rows))
    note = f'<p class="soft">{TWO_BARS}</p>' if any(checkpoint["ratio"] is not None for checkpoint in rows) else ""
    return section("checkpoints", "Checkpoints", note, *(_row(checkpoint, full_bar) for checkpoint in rows))


def _row(checkpoint: Row, full_bar: int) -> str:
    css = _KINDS.get(checkpoint["kind"], "total")
    stored = [(css, checkpoint["stored_bytes"] / full_bar, f"stored: {size(checkpoint['stored_bytes'])}")]
    original = [(css, (checkpoint["bytes"] or 0) / full_bar, f"original: {size(checkpoint['bytes'] or 0)}")]
    is_packed = checkpoint["ratio"] is not None
    value = size(checkpoint["stored_bytes"]) + (f" <small>{checkpoint['ratio']:.2f}x</small>" if is_packed else "")
    words = [
        f"step {checkpoint['step']:,}" if checkpoint["step"] is not None else "",
        local_time(checkpoint["time"]),
        f"loss {number(checkpoint['loss'])}" if checkpoint["loss"] is not None else "",
        f"val. loss {number(checkpoint['val_loss'])}" if checkpoint["val_loss"] is not None else "",
        f"delta to {checkpoint['base']}" if checkpoint["base"] else checkpoint["kind"] or "",
        f"{checkpoint['raw']} is there as well, {size(checkpoint['raw_bytes'])}" if checkpoint["raw"] else "",
        checkpoint["asked"] or "",
        f"{number(checkpoint['steps'])} steps" if checkpoint["steps"] is not None else "",
        state(checkpoint) if checkpoint["damage"] is None else "",
    ]
    name = f'{text(checkpoint["name"])} <span class="soft">{text(", ".join(filter(None, words)))}</span>'
    if checkpoint["damage"] is not None:
        name += f' <b class="alarm">{text(checkpoint["damage"])}</b>'
    return row(name, stacks([original, stored] if is_packed else [stored]), value)
