"""The page of ``runs --html``: sizes and loss by step, and every checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt8 import __version__
from ckpt8.cli.show.charts import (
    check_target,
    close_axis,
    document,
    legend,
    log_axis,
    over_steps,
    row,
    stacks,
    text,
    tiles,
    write_page,
)
from ckpt8.cli.show.runs import Row, local_time, state, total_lines
from ckpt8.cli.show.tables import number
from ckpt8.core.text import counted, size

_KINDS = {"key": "weight", "delta": "moment2", "raw": "other"}
"""The style of every kind."""

_WORDS = {"key": "key", "delta": "delta", "raw": "not compressed"}
_LOSSES = {"loss": ("update", "training loss"), "val_loss": ("moment1", "validation loss")}

_TWO_BARS = "Where a row has two bars, the faint one is the original size and the other the stored size."

Point = tuple[int, float, str]


class RunPage:
    """The page about a run, to write to ``target``.

    Raises OutputError, before anything is read, if it cannot be written, or exists without ``force``.
    """

    def __init__(self, target: Path, *, force: bool) -> None:
        check_target(target, force=force)
        self._target, self._force = target, force

    def write(self, facts: Mapping[str, Any]) -> None:
        """Write the page about ``Run.to_json``. Raises OutputError."""
        name = facts["path"].rstrip("/").rpartition("/")[2] or facts["path"]
        rows = facts["checkpoints"]
        sections = [_heading(name, facts["totals"]), _charts(rows), _list(rows), _footer()]
        write_page(self._target, document(name, sections, {"facts": facts}), [Path(facts["path"])], force=self._force)


def _heading(name: str, totals: Mapping[str, Any]) -> str:
    shown = [
        ("checkpoints", f"{totals['checkpoints']:,}"),
        ("on disk", size(totals["stored_bytes"] + totals["raw_bytes"])),
    ]
    if totals["ratio"] is not None:
        shown += [("originals", size(totals["bytes"])), ("ratio", f"{totals['ratio']:.2f}x")]
    shown += [(what, f"{totals[key]:,}") for key, what in _problems(totals).items()]
    words = "".join(f'<p class="soft">{text(line)}</p>' for line in total_lines(totals))
    return f"<header><h1>{text(name)}</h1>{words}{tiles(shown)}</header>"


def _problems(totals: Mapping[str, Any]) -> dict[str, str]:
    return {key: what for key, what in (("damaged", "damaged"), ("base_missing", "without a base")) if totals[key]}


def _charts(rows: Sequence[Row]) -> str:
    """The section of sizes and losses by step; empty where no step is known."""
    entries: list[tuple[str, str]] = []
    charts = _sizes(rows, entries) + _losses(rows, entries)
    if not charts:
        return ""
    return f'<section id="steps"><h2>By step</h2>{legend(entries)}<div class="charts pairs">{charts}</div></section>'


def _figure(name: str, title: str, chart: str, points: int) -> str:
    note = f"{counted(points, 'point')}, those with a known step"
    return f'<figure data-chart="{name}"><figcaption>{title}</figcaption>{chart}<p class="note">{note}</p></figure>'


def _sizes(rows: Sequence[Row], entries: list[tuple[str, str]]) -> str:
    """The bytes of every checkpoint by its step; adds the entries of the legend."""
    known = [
        checkpoint
        for checkpoint in rows
        if checkpoint["step"] is not None and checkpoint["kind"] and checkpoint["stored_bytes"]
    ]
    if not known:
        return ""
    curves = []
    for kind, css in _KINDS.items():
        if points := [
            _point(checkpoint, checkpoint["stored_bytes"], size(checkpoint["stored_bytes"]))
            for checkpoint in known
            if _is(checkpoint, kind)
        ]:
            curves.append((css, sorted(points)))
            entries.append((f"dot {css}", _WORDS[kind]))
    axis = log_axis(
        [checkpoint["stored_bytes"] for checkpoint in known], lambda exponent: size(10**exponent).replace(".00", "")
    )
    return _figure("sizes", "Size", over_steps(curves, "step", "size", axis, joined=False), len(known))


def _is(checkpoint: Row, kind: str) -> bool:
    return bool(checkpoint["kind"] == kind)


def _point(checkpoint: Row, value: float, words: str) -> Point:
    return checkpoint["step"], value, f"{checkpoint['name']}: step {checkpoint['step']:,}, {words}"


def _losses(rows: Sequence[Row], entries: list[tuple[str, str]]) -> str:
    """The losses by step, a line for each run; adds the entries of the legend."""
    curves, values = [], []
    for key, (css, words) in _LOSSES.items():
        of_runs = defaultdict[str, list[Point]](list)
        for checkpoint in rows:
            if checkpoint["step"] is not None and checkpoint[key] is not None:
                of_runs[checkpoint["run"]].append(
                    _point(checkpoint, checkpoint[key], f"loss {number(checkpoint[key])}")
                )
        curves += [(css, sorted(points)) for points in of_runs.values()]
        values += [value for points in of_runs.values() for _, value, _ in points]
        entries += [(f"dot {css}", words)] if of_runs else []
    if not curves:
        return ""
    return _figure("losses", "Loss", over_steps(curves, "step", "loss", close_axis(values)), len(values))


def _list(rows: Sequence[Row]) -> str:
    full_bar = max(1, *(max(checkpoint["bytes"] or 0, checkpoint["stored_bytes"]) for checkpoint in rows))
    items = "".join(_row(checkpoint, full_bar) for checkpoint in rows)
    note = f'<p class="soft">{_TWO_BARS}</p>' if any(checkpoint["ratio"] is not None for checkpoint in rows) else ""
    return f'<section id="checkpoints"><h2>Checkpoints</h2>{note}{items}</section>'


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


def _footer() -> str:
    return f"<footer><p>Read from the heads of the files. ckpt8 {text(__version__)}</p></footer>"
