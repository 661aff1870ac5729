"""Shows in a terminal what ``bench`` measured."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from ckpt8.inspect.figures import size
from ckpt8.inspect.render import make_table, with_rows


def show_bench(console: Console, result: dict[str, Any]) -> None:
    """Print what ``bench`` measured."""
    console.print(
        f"{escape(result['checkpoint'])}, {size(result['bytes'])}, {result['threads']} threads, "
        f"medians of {result['repeat']} rounds",
        soft_wrap=True,
    )
    table = make_table("operation", "seconds", "of cp", "throughput", "output", "ratio", "peak memory")
    rows = [
        (
            row["operation"],
            f"{row['seconds']:.2f}",
            f"{row['to_cp']:.2f}x",
            f"{size(row['bytes_per_second'])}/s",
            size(row["output_bytes"]) if row["output_bytes"] else "-",
            f"{row['ratio']:.2f}x" if row["ratio"] else "-",
            size(row["peak_rss"]),
        )
        for row in result["results"]
    ]
    console.print(with_rows(table, rows))


def show_device_bench(console: Console, result: dict[str, Any]) -> None:
    """Print what ``bench --device`` measured."""
    console.print(
        f"{escape(result['device'])}: a copy moves {size(result['copy_bytes_per_second'])}/s; "
        f"kernels on {result['elements']:,} elements, steps of {result['parameters']:,} parameters",
        soft_wrap=True,
    )
    kernels = make_table("kernel", "ms", "throughput", "of copy")
    moved = [
        (
            row["kernel"],
            f"{row['seconds'] * 1e3:.3f}",
            f"{size(row['bytes_per_second'])}/s",
            f"{row['of_copy']:.2f}",
        )
        for row in result["kernels"]
    ]
    console.print(with_rows(kernels, moved))
    steps = make_table("step", "ms", "ps per parameter", "of torch", "bytes per parameter")
    stepped = [
        (
            row["step"],
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['seconds_per_parameter'] * 1e12:.1f}",
            f"{row['to_torch']:.2f}x",
            f"{row['bytes_per_parameter']:.2f}",
        )
        for row in result["steps"]
    ]
    console.print(with_rows(steps, stepped))
    files = make_table("operation", "seconds", "size")
    ended = [(row["operation"], f"{row['seconds']:.2f}", size(row["bytes"] or 0)) for row in result["files"]]
    console.print(with_rows(files, ended))
