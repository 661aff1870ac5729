"""Shows the results of ``diff``, ``convert`` and ``verify`` in a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ckpt8.cli.guard import is_verbose, most
from ckpt8.cli.show.tables import (
    HANG,
    Table,
    error_line,
    measured_lines,
    number,
    say,
    shape_text,
    show_optimizers,
    show_table,
    warnings_of,
)
from ckpt8.core.text import counted, listed, printable, printable_tree, shortened, size
from ckpt8.inspecting.diff import verdict
from ckpt8.inspecting.facts import ROLE_WORDS

if TYPE_CHECKING:
    from ckpt8.converting.request import Report
    from ckpt8.inspecting.verify import Verification

_LISTED, _VALUES, _LAYERS, _MOMENT_LAYERS = 10, 16, 12, 4
_LONGEST = 80
"""Characters of a value."""

_NUMBERS = re.compile(r"(?<=[.:])[0-9]+(?=\.|$)")
_TITLES = {
    "weight": "change of the weights by layer",
    "moment1": "change of first moments by layer",
    "moment2": "change of second moments by layer",
}


def show_diff(console: Console, facts: dict[str, Any], *, tensors: bool) -> None:
    """Print ``Difference.to_json``, with ``tensors`` every tensor; escape unprintable characters of names."""
    facts = printable_tree(facts)
    for side in ("a", "b"):
        own = facts[side]
        kind = f"{'ckpt8 of ' if own['ckpt8'] else ''}{own['layout']}"
        say(console, f"{side.upper()}  {own['path']}  {kind}, {size(own['bytes'])}")
    console.print()
    say(console, verdict(facts), style="bold")
    say(console, *_sentences(facts))
    _show_one_sided(console, facts)
    _show_list(
        console,
        "tensors of another shape or type",
        [
            f"{tensor['name']}  {tensor['dtype']} {shape_text(tensor['shape'])} -> "
            f"{tensor['dtype_b']} {shape_text(tensor['shape_b'])}"
            for tensor in facts["tensors"]["both"]
            if (tensor["dtype"], tensor["shape"]) != (tensor["dtype_b"], tensor["shape_b"])
        ],
    )
    _show_values(console, facts)
    if not facts["identical"]:
        for role, title in _TITLES.items():
            layers = [
                (row["layer"] or "(without names)", *(number(row[key]) for key in ("relative", "rms_change", "rms")))
                for row in facts["layers"][role]
                if row["differ"]
            ]
            _show_rows(
                console,
                (title, "relative", "RMS change", "RMS in A"),
                layers,
                _LAYERS if role == "weight" else _MOMENT_LAYERS,
            )
    _show_tensors(console, facts["tensors"]["both"], everything=tensors)
    _show_not_finite(console, facts["tensors"]["both"])
    _show_list(console, "notes", facts["notes"])


def _sentences(facts: dict[str, Any]) -> Iterable[str]:
    """A sentence for each role whose tensors changed."""
    for role, total in facts["roles"].items():
        changed = total["tensors"] - total["identical"]
        if role != "other" and total["differ"] and total["max_change"] is not None:
            yield (
                f"{ROLE_WORDS[role]}: {changed:,} of {total['tensors']:,} differ, in {total['differ']:,} of "
                f"{total['elements']:,} elements; the difference is {number(total['relative'])} of their size "
                f"(||B-A||/||A||), at most {number(total['max_change'])} in one element"
            )
        elif changed:
            yield f"{ROLE_WORDS[role]}: {changed:,} of {total['tensors']:,} differ"


def _show_one_sided(console: Console, facts: dict[str, Any]) -> None:
    for key in ("only_a", "only_b"):
        tensors = [
            f"{item['name']}  {item['dtype']} {shape_text(item['shape'])}"
            + (f", tied to {item['tied']}" if item["tied"] else "")
            for item in facts["tensors"][key]
        ]
        values = [f"{item['name']}  {shortened(str(item[key[-1]]), _LONGEST)}" for item in facts["values"][key]]
        for what, rows in (("tensors", tensors), ("values", values), ("files", facts["files"][key])):
            _show_list(console, f"{what} only in {key[-1].upper()}", rows)
    _show_list(console, "files that differ", facts["files"]["changed"])


def _show_list(console: Console, title: str, rows: Sequence[str]) -> None:
    """Print rows; one line stands for more than three that differ in the numbers of their paths alone."""
    if rows:
        console.print(f"\n[bold]{title}[/] ({len(rows):,})")
        counts = Counter(map(_pattern, rows))
        shown = ((row, _pattern(row), counts[_pattern(row)]) for row in rows)
        lines = list(dict.fromkeys(f"{name}  ({count:,} of them)" if count > 3 else row for row, name, count in shown))
        for line in lines[: most(_LISTED)]:
            say(console, line, indent="  ")
        _show_more(console, len(lines) - most(_LISTED))


def _pattern(row: str) -> str:
    name, gap, rest = row.partition("  ")
    module, versions, _ = name.partition("_metadata.")
    return f"{module}{versions}*" if versions else f"{_NUMBERS.sub('*', name)}{gap}{rest}"


def _show_more(console: Console, left: int) -> None:
    if left > 0:
        console.print(f"  and {left:,} more")


def _show_values(console: Console, facts: dict[str, Any]) -> None:
    """Print a table of changed values and one-element tensors. Equal changes share a row."""
    changed = [(value["name"], value["a"], value["b"]) for value in facts["values"]["changed"]]
    changed += [(t["name"], *t["values"]) for t in facts["tensors"]["both"] if t["values"] is not None]
    alike: dict[tuple[str, str, str], list[str]] = {}
    # Settings of the optimizer first, and values at the top before the entries of a log.
    for name, a, b in sorted(changed, key=lambda value: (".param_groups." not in f".{value[0]}", value[0].count("."))):
        # Floats have all digits if they agree in six.
        texts = [f"{value:.6g}" if isinstance(value, float) else shortened(str(value), _LONGEST) for value in (a, b)]
        first, second = texts if texts[0] != texts[1] else (shortened(str(a), _LONGEST), shortened(str(b), _LONGEST))
        alike.setdefault((_NUMBERS.sub("*", name), first, second), []).append(name)
    rows = [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names):,} of them)", a, b)
        for (pattern, a, b), names in alike.items()
    ]
    if rows:
        show_table(console, ("value", "A", "B"), rows[: most(_VALUES)], left=True)
        _show_more(console, len(rows) - most(_VALUES))


def _show_rows(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], limit: int) -> None:
    if rows:
        show_table(console, columns, rows[: most(limit)])
        _show_more(console, len(rows) - most(limit))


def _show_tensors(console: Console, tensors: Sequence[dict[str, Any]], *, everything: bool) -> None:
    if everything:
        tables = {"tensor": tensors}
    else:
        changed = [tensor for tensor in tensors if tensor["change"] is not None and not tensor["identical"]]
        changed.sort(key=lambda row: (row["change"]["relative"] is not None, -(row["change"]["relative"] or 0.0)))
        tables = {
            "weights that changed most": [tensor for tensor in changed if tensor["role"] == "weight"],
            # Step counters are in the table of values.
            "others that changed most": [t for t in changed if t["role"] != "weight" and t["values"] is None],
        }
    for title, rows in tables.items():
        _show_rows(
            console,
            (title, "role", "shape", "elements that differ", "max |B-A|", "relative"),
            list(map(_cells, rows)),
            len(tensors) if everything else _LISTED,
        )


def _cells(tensor: dict[str, Any]) -> Sequence[str]:
    change = tensor["change"]
    name = tensor["name"] if tensor["name_b"] == tensor["name"] else f"{tensor['name']} = {tensor['name_b']}"
    if tensor["parameter"] is not None and tensor["parameter"] not in name:
        name = f"{name} of {tensor['parameter']}"
    differ = "-" if change is None else f"{change['differ']:,} of {change['elements']:,}"
    largest, relative = ("-" if change is None else number(change[key]) for key in ("max_change", "relative"))
    last = "identical" if tensor["identical"] else relative
    return name, tensor["role"], shape_text(tensor["shape"]), differ, largest, last


def _show_not_finite(console: Console, tensors: Sequence[dict[str, Any]]) -> None:
    rows = []
    for tensor in tensors:
        change = tensor["change"]
        if change is not None and any((*change["nan"], *change["infinite"])):
            counts = [f"{nan:,} NaN, {inf:,} Inf" for nan, inf in zip(change["nan"], change["infinite"], strict=True)]
            rows.append(f"{tensor['name']}  A: {counts[0]}; B: {counts[1]}")
    _show_list(console, "not finite, and left out of the figures", rows)


def show_converted(console: Console, report: Report, seconds: float) -> None:
    """Print the target, the casts, and everything that the target lacks."""
    tensors = counted(report.tensors, "tensor")
    lines = [
        f"{report.target}: {report.format} of {tensors}, {size(report.bytes)} in {seconds:.2f} s",
        *(f"cast        {counted(count, 'tensor')} {cast}" for cast, count in report.casts.items()),
    ]
    if report.quantized is not None:
        from ckpt8.converting.quantizing import lines as quantized

        lines += quantized(report.quantized)
    if report.aliases:
        lines.append(f"tied        left out: {listed(report.aliases, 20)}")
    dropped, notes = (
        (f"left out    {line}" for line in report.dropped),
        (f"note        {line}" for line in report.notes),
    )
    say(console, *map(printable, (*lines, *dropped, *notes)), hang=12)


def show_verified(console: Console, src: Path, against: Path | None, result: Verification) -> None:
    """Print the result, and the figures of replayed steps."""
    if result.plain is not None:
        say(console, printable(f"{src}: {result.plain.line()}"))
        return
    text = f"{src}: intact, all {result.frames:,} frames and the seal ({size(result.nbytes)})"
    if result.against and not result.failures:
        text += f"; against {against}: every lossless tensor is equal"
        if result.statistics:
            are = "is" if result.statistics == 1 else "are"
            text += f", and the {counted(result.statistics, 'figure')} of the error {are} as stated"
        if result.unmeasured:
            text += f"; {result.unmeasured} lossy tensors carry no statistics to check"
    links = [f"with what it needs of {', '.join(result.links)}"] if result.links else []
    say(console, *map(printable, [text, *links]))
    if steps := printable_tree(result.steps):
        say(console, f"error: {error_line(steps)}")
        say(console, *warnings_of(steps), indent="  ")
        if is_verbose():
            say(console, *measured_lines(steps), hang=HANG)
            show_optimizers(console, steps)
    if result.resume is not None:
        _show_replay(console, result.resume)


def _show_replay(console: Console, resume: dict[str, Any]) -> None:
    """Print how far the compressed run is from the original after every replayed step."""
    from ckpt8.inspecting.replay import left_out

    if resume["parameters"]:
        say(
            console,
            f"replayed {counted(len(resume['steps']), 'step')} of {counted(resume['parameters'], 'parameter')}; "
            f"replay error {number(resume['replay_error'])}",
        )
        keys = ("update_nmse", "update_max", "weight_rms", "weight_max")
        rows = [(str(k), *(number(step[key]) for key in keys)) for k, step in enumerate(resume["steps"], 1)]
        console.print(Table(("step", "update NMSE", "max |Δu|", "weights RMS", "weights max"), rows))
        first = resume["first_of_gradient_rules"]
        if first and first["parameters"] < resume["parameters"]:
            say(
                console,
                f"first step of the {counted(first['parameters'], 'parameter')} whose step needs a gradient: "
                f"NMSE {number(first['update_nmse'])}, max |Δu| {number(first['update_max'])}",
            )
    else:
        say(console, "nothing could be replayed: the replay error is unknown")
    say(console, *map(printable, left_out(resume)))
