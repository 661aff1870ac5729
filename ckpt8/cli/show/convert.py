"""Shows the report of ``convert`` in a terminal."""

from __future__ import annotations

from rich.console import Console

from ckpt8.cli.output import print_lines
from ckpt8.converting.quantizing.report import lines as quantized
from ckpt8.converting.request import Report
from ckpt8.core.text import listed, size

_SHOWN = 20


def show(console: Console, report: Report, seconds: float) -> None:
    """Print the target, the casts, and everything that the target lacks."""
    lines = [
        f"{report.target}: {report.format} of {report.tensors:,} tensors, {size(report.bytes)} in {seconds:.2f} s",
        *(f"cast        {count:,} tensors {cast}" for cast, count in report.casts.items()),
    ]
    if report.quantized is not None:
        lines += quantized(report.quantized)
    if report.aliases:
        lines.append(f"tied        left out: {listed(report.aliases, _SHOWN)}")
    lines += [f"left out    {line}" for line in report.dropped]
    lines += [f"note        {line}" for line in report.notes]
    print_lines(console, lines)
