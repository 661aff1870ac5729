"""Shows ``inspect --readiness`` in a terminal: a verdict for each format, and the figures behind it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from ckpt8.cli.show.tables import Table, say, show_table
from ckpt8.core.text import counted, percent
from ckpt8.inspecting.facts import ROLE_WORDS
from ckpt8.inspecting.readiness import RAW, SCALED, snr, snr_text

COLUMNS = ("format", "ideal", "role", "raw SNR", "over", "under", "sub", "scaled SNR", "over", "under", "sub")


def show_readiness(console: Console, readiness: dict[str, Any], *, tensors: bool) -> None:
    """Print ``facts["readiness"]``, all of it printable text; ``tensors`` lists every tensor with its SNR."""
    console.print()
    say(console, "Low-precision readiness: the SNR of rounding to each format", style="bold")
    say(console, *(row["line"] for row in readiness["formats"]), *coverage(readiness))
    show_table(console, COLUMNS, format_rows(readiness["formats"]))
    if "against" in readiness:
        title, *lines = measured_lines(readiness["against"])
        console.print()
        say(console, title, style="bold")
        say(console, *lines)
    if tensors:
        _show_tensors(console, readiness)


def coverage(readiness: dict[str, Any]) -> list[str]:
    """Lines on how much was read, and what is left out."""
    count, total = readiness["looked_at"], readiness["elements"]
    sample, odd = readiness["sample"], readiness["nonfinite"]
    return [
        f"all {total:,} elements of {len(readiness['tensors']):,} weights and moments"
        if count == total
        else f"a sample of {count:,} of {total:,} elements: of every weight and moment at most {sample['elements']:,} "
        f"in {sample['windows']} runs; --full reads all",
        *([f"{odd:,} of them are NaN or infinite, and are left out"] if odd else []),
        *(f"left out: {counted(count, 'tensor')} {why}" for why, count in readiness["left_out"].items()),
    ]


def format_rows(formats: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """The cells of ``COLUMNS`` for every format and role."""
    for number_format in formats:
        name, ideal = number_format["label"], f"{number_format['ideal_snr_db']:.1f}"
        for role, report in number_format["roles"].items():
            cells = []
            for figures in (report[RAW], report[SCALED]):
                cells += [
                    snr(figures["snr_db"]),
                    *(percent(figures[key]) for key in ("overflow", "underflow", "subnormal")),
                ]
            yield name, ideal, ROLE_WORDS[role], *cells
            name = ideal = ""


def measured_lines(against: dict[str, Any]) -> list[str]:
    """What the SNR of the file against another is of, then that of every role."""
    lines = [f"The SNR of this file against {against['path']}, tensors in units of their own RMS"]
    for role, total in against["roles"].items():
        lines.append(f"{ROLE_WORDS[role]}, {counted(total['tensors'], 'tensor')}: {snr_text(total)}")
    if against["unpaired"]:
        lines.append(f"{counted(against['unpaired'], 'tensor')} without a counterpart of the same name and shape in it")
    return lines


def _show_tensors(console: Console, readiness: dict[str, Any]) -> None:
    """Print the SNR of every tensor by format, raw and scaled, and that of its copy, if one was measured."""
    console.print()
    say(console, "SNR in dB of rounding to each format, raw and scaled; measured: of this file", style="bold")
    formats = {number_format["format"]: number_format["label"] for number_format in readiness["formats"]}
    rows = [
        (
            tensor["label"],
            f"{tensor['rms']:.2g}",
            f"2^{math.frexp(tensor['unit_scale'])[1] - 1}",
            *(_pair(tensor, name) for name in formats),
            "-" if tensor["measured"] is None else snr(tensor["measured"]["snr_db"]),
        )
        for tensor in readiness["tensors"]
    ]
    console.print(Table(("tensor", "RMS", "unit", *formats.values(), "measured"), rows))


def _pair(tensor: dict[str, Any], name: str) -> str:
    if tensor["formats"] is None:
        return "-"
    figures = tensor["formats"][name]
    return f"{snr(figures[RAW]['snr_db'])} {snr(figures[SCALED]['snr_db'])}"
