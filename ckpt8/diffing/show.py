"""Shows in a terminal what ``diff`` found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ckpt8.inspect.render import make_table, number, size, with_rows
from ckpt8.text import printable_tree

_NARROW = 72
"""Columns of a terminal below which tables have only the columns that matter most."""

_LISTED, _LAYERS, _MOMENT_LAYERS = 10, 12, 4
_WORDS = {"weight": "weights", "moment1": "first moments", "moment2": "second moments", "other": "other tensors"}
_TITLES = {
    "weight": "change of the weights by layer",
    "moment1": "change of first moments by layer",
    "moment2": "change of second moments by layer",
}
Row = Sequence[str]


def show(console: Console, facts: dict[str, Any], *, tensors: bool) -> None:
    """Print ``Difference.to_json``; ``tensors`` lists all of them. What in names is not printable is escaped."""
    facts = printable_tree(facts)
    for side in ("a", "b"):
        each = facts[side]
        kind = f"ckpt8 of {each['layout']}" if each["ckpt8"] else each["layout"]
        console.print(f"{side.upper()}  {escape(each['path'])}  {kind}, {size(each['bytes'])}", soft_wrap=True)
    console.print(f"\n[bold]{escape(verdict(facts))}[/]", soft_wrap=True)
    for line in _words(facts):
        console.print(escape(line), soft_wrap=True)
    _show_one_sided(console, facts)
    _show_shapes(console, facts["tensors"]["both"])
    _show_values(console, facts)
    if not facts["identical"]:
        for role, title in _TITLES.items():
            _show_layers(console, title, facts["layers"][role], _LAYERS if role == "weight" else _MOMENT_LAYERS)
    _show_tensors(console, facts["tensors"]["both"], everything=tensors)
    _show_not_finite(console, facts["tensors"]["both"])
    for note in facts["notes"]:
        console.print(f"note: {escape(note)}", soft_wrap=True)


def verdict(facts: dict[str, Any]) -> str:
    """One line: identical, or how much of what both have differs, and how much only one has."""
    both = facts["tensors"]["both"]
    counts = [
        ("tensors", sum(not each["identical"] for each in both), len(both), facts["tensors"]),
        ("other values", len(facts["values"]["changed"]), facts["values"]["equal"], facts["values"]),
        ("other files", len(facts["files"]["changed"]), facts["files"]["equal"], facts["files"]),
    ]
    counts[1:] = [(what, differ, differ + equal, found) for what, differ, equal, found in counts[1:]]
    if facts["identical"]:
        told = [f"{total:,} {what}" for what, _, total, _ in counts if total]
        return f"identical: {', '.join(told)}; tensors bit for bit"
    parts = []
    for what, differ, total, found in counts:
        if total:
            parts.append(f"{differ:,} of {total:,} {what} differ" if differ else f"{total:,} {what} equal")
        parts += [f"{len(found[key]):,} {what} only in {key[-1].upper()}" for key in ("only_a", "only_b") if found[key]]
    return f"different: {'; '.join(parts)}"


def _words(facts: dict[str, Any]) -> Iterable[str]:
    """What changed by role, in a sentence each."""
    for role, total in facts["roles"].items():
        changed = total["tensors"] - total["identical"]
        if changed and total["max_change"] is not None:
            yield (
                f"{_WORDS[role]}: {changed:,} of {total['tensors']:,} differ, in {total['differ']:,} of "
                f"{total['elements']:,} elements; ||B-A||/||A|| {number(total['relative'])}, "
                f"max |B-A| {number(total['max_change'])}"
            )
        elif changed:
            yield f"{_WORDS[role]}: {changed:,} of {total['tensors']:,} differ"


def _show_one_sided(console: Console, facts: dict[str, Any]) -> None:
    for key in ("only_a", "only_b"):
        tensors = [f"{each['name']}  {each['dtype']} {_shape(each['shape'])}" for each in facts["tensors"][key]]
        values = [f"{each['name']}  {each[key[-1]]}" for each in facts["values"][key]]
        for what, rows in (("tensors", tensors), ("values", values), ("files", facts["files"][key])):
            _show_list(console, f"{what} only in {key[-1].upper()}", rows)
    _show_list(console, "files that differ", facts["files"]["changed"])


def _show_list(console: Console, title: str, rows: Sequence[str]) -> None:
    if rows:
        console.print(f"\n[bold]{title}[/] ({len(rows):,})")
        for row in rows[:_LISTED]:
            console.print(f"  {row}", soft_wrap=True, markup=False)
        _show_more(console, len(rows) - _LISTED)


def _show_more(console: Console, left: int) -> None:
    if left > 0:
        console.print(f"  and {left:,} more")


def _show_shapes(console: Console, tensors: Sequence[dict[str, Any]]) -> None:
    rows = [
        f"{each['name']}  {each['dtype']} {_shape(each['shape'])} -> {each['dtype_b']} {_shape(each['shape_b'])}"
        for each in tensors
        if (each["dtype"], each["shape"]) != (each["dtype_b"], each["shape_b"])
    ]
    _show_list(console, "tensors of another shape or type", rows)


def _show_values(console: Console, facts: dict[str, Any]) -> None:
    """Values that changed, and tensors of one number; those that changed alike are one row."""
    changed = [(each["name"], each["a"], each["b"]) for each in facts["values"]["changed"]]
    changed += [(t["name"], *t["values"]) for t in facts["tensors"]["both"] if t["values"] is not None]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, a, b in changed:
        alike.setdefault((name.rpartition(".")[2], str(a), str(b)), []).append(name)
    rows = [
        (names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} like it", a, b)
        for (_, a, b), names in alike.items()
    ]
    if rows:
        table = make_table("value", "A", "B")
        for column in table.columns:
            column.no_wrap, column.overflow, column.justify = False, "fold", "left"
        console.print()
        console.print(with_rows(table, rows[:_LISTED]))
        _show_more(console, len(rows) - _LISTED)


def _show_layers(console: Console, title: str, layers: Sequence[dict[str, Any]], limit: int) -> None:
    rows = [row for row in layers if row["differ"]]
    if not rows:
        return
    columns = {"relative": "relative", "RMS change": "rms_change", "RMS in A": "rms"}
    keys = list(columns.items())[: 1 if console.width < _NARROW else None]
    table = make_table(title, *(name for name, _ in keys))
    cells = [(row["layer"] or "(without names)", *(number(row[key]) for _, key in keys)) for row in rows[:limit]]
    console.print()
    console.print(with_rows(table, cells))
    _show_more(console, len(rows) - limit)


def _show_tensors(console: Console, tensors: Sequence[dict[str, Any]], *, everything: bool) -> None:
    compared = [each for each in tensors if each["change"] is not None]
    rows = tensors if everything else sorted((t for t in compared if not t["identical"]), key=_rank)
    if not rows:
        return
    wide = console.width >= _NARROW
    table = _tensor_table("tensor" if everything else "tensors that changed most", wide=wide)
    shown = rows if everything else rows[:_LISTED]
    console.print()
    console.print(with_rows(table, (_cells(each, wide=wide) for each in shown)))
    _show_more(console, len(rows) - len(shown))


def _rank(tensor: dict[str, Any]) -> float:
    relative: float | None = tensor["change"]["relative"]
    return float("-inf") if relative is None else -relative


def _tensor_table(title: str, *, wide: bool) -> Table:
    if wide:
        return make_table(title, "role", "shape", "elements that differ", "max |B-A|", "relative")
    return make_table(title, "relative")


def _cells(tensor: dict[str, Any], *, wide: bool) -> Row:
    change = tensor["change"]
    name = tensor["name"] if tensor["name_b"] == tensor["name"] else f"{tensor['name']} = {tensor['name_b']}"
    relative = "identical" if tensor["identical"] else "-" if change is None else number(change["relative"])
    if not wide:
        return name, relative
    differ = "-" if change is None else f"{change['differ']:,} of {change['elements']:,}"
    largest = "-" if change is None else number(change["max_change"])
    return name, tensor["role"], _shape(tensor["shape"]), differ, largest, relative


def _show_not_finite(console: Console, tensors: Sequence[dict[str, Any]]) -> None:
    rows = []
    for each in tensors:
        change = each["change"]
        if change is not None and change["excluded"]:
            counts = [f"{nan:,} NaN, {inf:,} Inf" for nan, inf in zip(change["nan"], change["infinite"], strict=True)]
            rows.append(f"{each['name']}  A: {counts[0]}; B: {counts[1]}")
    _show_list(console, "not finite, and left out of the figures", rows)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
