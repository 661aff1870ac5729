"""Shows in a terminal what ``diff`` found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from ckpt8.cli.show.tables import number, shape_text, show_table
from ckpt8.core.text import printable_tree, size

_NARROW = 72
"""Columns of a terminal below which tables have only the columns that matter most."""

_LISTED, _VALUES, _LAYERS, _MOMENT_LAYERS = 10, 16, 12, 4
_LONGEST = 80
"""Characters of a value."""

_ALIKE = 3
"""How many names that differ in numbers alone are listed one by one."""

_NUMBERS = re.compile(r"(?<=[.:])[0-9]+(?=\.|$)")
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
    _show_list(console, "notes", facts["notes"])


def verdict(facts: dict[str, Any]) -> str:
    """One line: identical, or how much of what both have differs, and how much only one has."""
    both = facts["tensors"]["both"]
    kinds = {
        "tensors": (sum(not each["identical"] for each in both), len(both), facts["tensors"]),
        "other values": _counted(facts["values"]),
        "other files": _counted(facts["files"]),
    }
    if facts["identical"]:
        told = [f"{total:,} {what}" for what, (_, total, _) in kinds.items() if total]
        return f"identical: {', '.join(told)}; tensors bit for bit"
    parts = []
    for what, (differ, total, found) in kinds.items():
        told = [f"{differ:,} of {total:,} differ" if differ else f"all {total:,} equal"] if total else []
        told += [f"{len(found[key]):,} only in {key[-1].upper()}" for key in ("only_a", "only_b") if found[key]]
        parts += [f"{what}: {', '.join(told)}"] if told else []
    return f"different: {'; '.join(parts)}"


def _counted(found: dict[str, Any]) -> tuple[int, int, dict[str, Any]]:
    changed = len(found["changed"])
    return changed, changed + found["equal"], found


def _words(facts: dict[str, Any]) -> Iterable[str]:
    """A sentence for each role of which tensors changed."""
    for role, total in facts["roles"].items():
        changed = total["tensors"] - total["identical"]
        if role != "other" and total["differ"] and total["max_change"] is not None:
            yield (
                f"{_WORDS[role]}: {changed:,} of {total['tensors']:,} differ, in {total['differ']:,} of "
                f"{total['elements']:,} elements; the difference is {number(total['relative'])} of their size "
                f"(||B-A||/||A||), at most {number(total['max_change'])} in one element"
            )
        elif changed:
            yield f"{_WORDS[role]}: {changed:,} of {total['tensors']:,} differ"


def _show_one_sided(console: Console, facts: dict[str, Any]) -> None:
    for key in ("only_a", "only_b"):
        tensors = [
            f"{each['name']}  {each['dtype']} {shape_text(each['shape'])}"
            + (f", tied to {each['tied']}" if each["tied"] else "")
            for each in facts["tensors"][key]
        ]
        values = [f"{each['name']}  {_cut(str(each[key[-1]]))}" for each in facts["values"][key]]
        for what, rows in (("tensors", tensors), ("values", values), ("files", facts["files"][key])):
            _show_list(console, f"{what} only in {key[-1].upper()}", rows)
    _show_list(console, "files that differ", facts["files"]["changed"])


def _show_list(console: Console, title: str, rows: Sequence[str]) -> None:
    if rows:
        console.print(f"\n[bold]{title}[/] ({len(rows):,})")
        lines = _gathered(rows)
        for line in lines[:_LISTED]:
            console.print(f"  {line}", soft_wrap=True, markup=False)
        _show_more(console, len(lines) - _LISTED)


def _gathered(rows: Sequence[str]) -> list[str]:
    """The rows, with one line in place of many that differ in the numbers of their paths alone."""
    counts = Counter(map(_pattern, rows))
    lines: dict[str, None] = {}
    for row in rows:
        count = counts[_pattern(row)]
        lines[f"{_pattern(row)}  ({count:,} of them)" if count > _ALIKE else row] = None
    return list(lines)


def _pattern(row: str) -> str:
    name, gap, rest = row.partition("  ")
    module, versions, _ = name.partition("_metadata.")
    return f"{module}{versions}*" if versions else f"{_NUMBERS.sub('*', name)}{gap}{rest}"


def _show_more(console: Console, left: int) -> None:
    if left > 0:
        console.print(f"  and {left:,} more")


def _show_shapes(console: Console, tensors: Sequence[dict[str, Any]]) -> None:
    rows = [
        f"{each['name']}  {each['dtype']} {shape_text(each['shape'])} -> "
        f"{each['dtype_b']} {shape_text(each['shape_b'])}"
        for each in tensors
        if (each["dtype"], each["shape"]) != (each["dtype_b"], each["shape_b"])
    ]
    _show_list(console, "tensors of another shape or type", rows)


def _show_values(console: Console, facts: dict[str, Any]) -> None:
    """Print a table of changed values and one-element tensors. Those that changed alike share a row."""
    changed = [(each["name"], each["a"], each["b"]) for each in facts["values"]["changed"]]
    changed += [(t["name"], *t["values"]) for t in facts["tensors"]["both"] if t["values"] is not None]
    alike: dict[tuple[str, str, str], list[str]] = {}
    # Settings of the optimizer first, and what is at the top before the entries of a log.
    for name, a, b in sorted(changed, key=lambda each: (".param_groups." not in f".{each[0]}", each[0].count("."))):
        alike.setdefault((_NUMBERS.sub("*", name), *_texts(a, b)), []).append(name)
    rows = [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names):,} of them)", a, b)
        for (pattern, a, b), names in alike.items()
    ]
    if rows:
        show_table(console, ("value", "A", "B"), rows[:_VALUES], fold=True)
        _show_more(console, len(rows) - _VALUES)


def _texts(a: Any, b: Any) -> tuple[str, str]:
    """Two values as text, floats with all digits if six do not tell them apart."""
    short = [f"{value:.6g}" if isinstance(value, float) else _cut(str(value)) for value in (a, b)]
    return (short[0], short[1]) if short[0] != short[1] else (_cut(str(a)), _cut(str(b)))


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"


def _show_layers(console: Console, title: str, layers: Sequence[dict[str, Any]], limit: int) -> None:
    rows = [row for row in layers if row["differ"]]
    if not rows:
        return
    columns = {"relative": "relative", "RMS change": "rms_change", "RMS in A": "rms"}
    keys = list(columns.items())[: 1 if console.width < _NARROW else None]
    cells = [(row["layer"] or "(without names)", *(number(row[key]) for _, key in keys)) for row in rows[:limit]]
    show_table(console, (title, *(name for name, _ in keys)), cells)
    _show_more(console, len(rows) - limit)


def _show_tensors(console: Console, tensors: Sequence[dict[str, Any]], *, everything: bool) -> None:
    if everything:
        _show_table(console, "tensor", tensors, len(tensors))
        return
    changed = [each for each in tensors if each["change"] is not None and not each["identical"]]
    changed.sort(key=lambda each: (each["change"]["relative"] is not None, -(each["change"]["relative"] or 0.0)))
    weights = [each for each in changed if each["role"] == "weight"]
    _show_table(console, "weights that changed most", weights, _LISTED)
    # Step counters are in the table of values.
    others = [each for each in changed if each["role"] != "weight" and each["values"] is None]
    _show_table(console, "others that changed most", others, _LISTED)


def _show_table(console: Console, title: str, rows: Sequence[dict[str, Any]], limit: int) -> None:
    if not rows:
        return
    wide = console.width >= _NARROW
    columns = ("role", "shape", "elements that differ", "max |B-A|") if wide else ()
    show_table(console, (title, *columns, "relative"), [_cells(each, wide=wide) for each in rows[:limit]])
    _show_more(console, len(rows) - limit)


def _cells(tensor: dict[str, Any], *, wide: bool) -> Row:
    change = tensor["change"]
    name = tensor["name"] if tensor["name_b"] == tensor["name"] else f"{tensor['name']} = {tensor['name_b']}"
    if tensor["parameter"] is not None and tensor["parameter"] not in name:
        name = f"{name} of {tensor['parameter']}"
    relative = "identical" if tensor["identical"] else "-" if change is None else number(change["relative"])
    if not wide:
        return name, relative
    differ = "-" if change is None else f"{change['differ']:,} of {change['elements']:,}"
    largest = "-" if change is None else number(change["max_change"])
    return name, tensor["role"], shape_text(tensor["shape"]), differ, largest, relative


def _show_not_finite(console: Console, tensors: Sequence[dict[str, Any]]) -> None:
    rows = []
    for each in tensors:
        change = each["change"]
        if change is not None and any((*change["nan"], *change["infinite"])):
            counts = [f"{nan:,} NaN, {inf:,} Inf" for nan, inf in zip(change["nan"], change["infinite"], strict=True)]
            rows.append(f"{each['name']}  A: {counts[0]}; B: {counts[1]}")
    _show_list(console, "not finite, and left out of the figures", rows)
