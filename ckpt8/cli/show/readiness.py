"""Shows ``inspect --readiness``: a verdict for each format, and the figures behind it, to the width of the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ckpt8.core.text import percent
from ckpt8.inspecting.readiness.casting import RAW, SCALED
from ckpt8.inspecting.readiness.verdicts import PLURALS, snr, snr_text

_WIDE = 100
"""Columns of a terminal that shows raw and scaled figures side by side."""


def show_readiness(console: Console, readiness: dict[str, Any], *, tensors: bool = False) -> None:
    """Print ``facts["readiness"]``; ``tensors`` lists every tensor with its SNR. Its text must be printable already."""
    console.print("\n[bold]Low-precision readiness[/]")
    console.print(_what_was_read(readiness))
    for each in readiness["formats"]:
        console.print(f"[bold]{escape(each['label'])}[/]{escape(each['line'].removeprefix(each['label']))}")
    console.print()
    if console.width >= _WIDE:
        console.print(_wide_table(readiness["formats"]))
    else:
        _show_narrow(console, readiness["formats"])
    if "against" in readiness:
        _show_measured(console, readiness["against"])
    if tensors:
        console.print()
        _show_tensors(console, readiness)


def _what_was_read(readiness: dict[str, Any]) -> str:
    count, total = readiness["looked_at"], readiness["elements"]
    if count == total:
        lines = [f"all {total:,} elements of {len(readiness['tensors']):,} weights and moments"]
    else:
        sample = readiness["sample"]
        lines = [
            f"a sample of {count:,} of {total:,} elements: of every weight and moment at most {sample['elements']:,} "
            f"in {sample['windows']} runs; --full reads all"
        ]
    if readiness["nonfinite"]:
        lines.append(f"{readiness['nonfinite']:,} of them are NaN or infinite, and are left out")
    lines += [f"left out: {count:,} tensors {escape(why)}" for why, count in readiness["left_out"].items()]
    return "\n".join(lines)


def _wide_table(formats: Sequence[dict[str, Any]]) -> Table:
    table = _table("format", "ideal", "", "raw SNR", "over", "under", "sub", "scaled SNR", "over", "under", "sub")
    for each in formats:
        name, ideal = each["label"], f"{each['ideal_snr_db']:.1f}"
        for role, report in each["roles"].items():
            table.add_row(name, ideal, PLURALS[role], *_cells(report[RAW]), *_cells(report[SCALED]))
            name = ideal = ""
    return table


def _show_narrow(console: Console, formats: Sequence[dict[str, Any]]) -> None:
    for each in formats:
        console.print(f"{each['label']}, ideal SNR {each['ideal_snr_db']:.1f} dB")
        table = _table("", "SNR", "over", "under", "sub", gap=1)
        for role, report in each["roles"].items():
            table.add_row(role, *_cells(report[RAW]))
            table.add_row(f"  {each['scaling']}", *_cells(report[SCALED]))
        console.print(table)


def _table(*columns: str, gap: int = 2) -> Table:
    """A table without lines; words to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "format", "tensor", "dtype") else "right")
    return table


def _cells(figures: dict[str, Any]) -> Iterator[str]:
    yield snr(figures["snr_db"])
    for key in ("overflow", "underflow", "subnormal"):
        yield percent(figures[key])


def _show_measured(console: Console, against: dict[str, Any]) -> None:
    console.print(f"\n[bold]Measured[/] against {escape(against['path'])}", soft_wrap=True)
    for role, total in against["roles"].items():
        console.print(f"{PLURALS[role]}, {total['tensors']:,} tensors: {escape(snr_text(total))}")
    if against["unpaired"]:
        console.print(f"{against['unpaired']:,} tensors have no counterpart of their name and shape in it")


def _show_tensors(console: Console, readiness: dict[str, Any]) -> None:
    """SNR of every tensor by format, ``raw > scaled``, with the name above it where the terminal is narrow."""
    formats = [(each["format"], each["label"]) for each in readiness["formats"]]
    if console.width >= _WIDE:
        table = _table("tensor", "RMS", "unit", *(label for _, label in formats), "measured")
        table.columns[0].overflow = "fold"
        for tensor in readiness["tensors"]:
            cells = [_pair(tensor, name) for name, _ in formats]
            table.add_row(escape(tensor["label"]), *_scale(tensor), *cells, _measured(tensor))
        console.print("[bold]SNR in dB, raw and scaled[/]")
        console.print(table)
        return
    for tensor in readiness["tensors"]:
        rms, unit = _scale(tensor)
        console.print(f"[bold]{escape(tensor['label'])}[/] RMS {rms}, unit {unit}")
        lines = [f"  {label:<11}{_pair(tensor, name)}" for name, label in formats]
        if tensor["measured"] is not None:
            lines.append(f"  {'measured':<11}{_measured(tensor)}")
        console.print("\n".join(lines))


def _scale(tensor: dict[str, Any]) -> tuple[str, str]:
    return f"{tensor['rms']:.2g}", f"2^{math.frexp(tensor['unit_scale'])[1] - 1}"


def _pair(tensor: dict[str, Any], name: str) -> str:
    if tensor["formats"] is None:
        return "-"
    figures = tensor["formats"][name]
    return f"{snr(figures[RAW]['snr_db'])} {snr(figures[SCALED]['snr_db'])}"


def _measured(tensor: dict[str, Any]) -> str:
    return "-" if tensor["measured"] is None else snr(tensor["measured"]["snr_db"])
