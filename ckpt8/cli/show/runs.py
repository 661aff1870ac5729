"""Shows the checkpoints of a run in a terminal."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console

from ckpt8.cli.show.inspect import say
from ckpt8.cli.show.tables import Table, number, show_table
from ckpt8.core.text import counted, printable_tree, size

Row = Mapping[str, Any]


def show(console: Console, facts: Mapping[str, Any]) -> None:
    """Print ``Run.to_json``; escape unprintable characters of names. Columns without a value are left out."""
    facts = printable_tree(facts)
    say(console, facts["path"], style="bold")
    rows: Sequence[Row] = facts["checkpoints"]
    shown = {title: column for title, cell in _COLUMNS if any(column := [cell(row) for row in rows])}
    console.print(Table(("checkpoint", *shown), list(zip((row["name"] for row in rows), *shown.values(), strict=True))))
    if damaged := [(row["name"], row["damage"]) for row in rows if row["damage"] is not None]:
        show_table(console, ("damaged", "reason"), damaged)
    console.print()
    say(console, *total_lines(facts["totals"]))


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
    return "" if row["kind"] == "raw" else "seal holds"


def local_time(time: str) -> str:
    """A time in the zone of the reader, to the minute."""
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}"


def _known(value: float | None) -> str:
    return "" if value is None else number(value)


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("step", lambda row: "" if row["step"] is None else f"{row['step']:,}"),
    ("saved", lambda row: local_time(row["time"])),
    ("loss", lambda row: _known(row["loss"])),
    ("val. loss", lambda row: _known(row["val_loss"])),
    ("kind", lambda row: " + ".join(filter(None, (row["kind"], row["raw"] and "raw")))),
    ("base", lambda row: row["base"] or ""),
    ("made with", lambda row: row["asked"] or ""),
    ("size", lambda row: size(row["stored_bytes"])),
    ("ratio", lambda row: "" if row["ratio"] is None else f"{row['ratio']:.2f}x"),
    ("error in steps", lambda row: _known(row["steps"])),
    ("state", state),
)
"""The title and the text of every column but the name."""
