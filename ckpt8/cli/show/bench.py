"""Shows the figures of ``bench`` in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from ckpt8.cli.bench.probe import START
from ckpt8.cli.show.tables import Table
from ckpt8.core.text import counted, printable_tree, size


def show_bench(console: Console, result: dict[str, Any]) -> None:
    """Print the figures of ``bench``; escape unprintable characters of names."""
    result = printable_tree(result)
    rounds = "one round" if result["repeat"] == 1 else f"medians of {result['repeat']:,} rounds"
    console.print(
        f"{escape(result['checkpoint'])}, {size(result['bytes'])}, {counted(result['threads'], 'thread')}, "
        f"{rounds}, bytes of the checkpoint per second",
        soft_wrap=True,
    )
    if synthetic := result["synthetic"]:
        console.print(
            f"{synthetic['parameters']:,} parameters and moments of AdamW, drawn at random: "
            "for the size of a real one, name a checkpoint",
            soft_wrap=True,
        )
    columns = ("operation", "seconds", "range", "of cp", "throughput", "output", "ratio", "peak memory", "of cp")
    rows = [
        (
            row["operation"],
            f"{row['seconds']:.2f}",
            _range(row["spread"]),
            f"{row['to_cp']['seconds']:.2f}x",
            "-" if row["operation"] == START else f"{size(row['bytes_per_second'])}/s",
            size(row["output_bytes"]) if row["output_bytes"] else "-",
            f"{row['ratio']:.2f}x" if row["ratio"] else "-",
            size(row["peak_memory"]),
            f"{row['to_cp']['peak_memory']:.1f}x",
        )
        for row in result["results"]
    ]
    console.print(Table(columns, rows))
    for name, reason in result["left_out"].items():
        console.print(f"{name}: {reason}", markup=False, soft_wrap=True)
    console.print(
        "the start is in no other figure; peak memory is that of all processes of an operation: the kernel's own "
        "record of the first (VmHWM) or, where more, the sum of shares (PSS) in samples",
        soft_wrap=True,
    )
    if load := result["load_to_torch"]:
        console.print(
            f"load takes {load['seconds']:.2f}x the time and {load['peak_memory']:.2f}x the memory of torch.load; "
            f"memory beyond the size of the files: {size(load['beyond_files'])}, "
            f"torch.load {size(load['torch_beyond_files'])}",
            soft_wrap=True,
        )


def _range(spread: list[float]) -> str:
    return f"{spread[0]:.2f} to {spread[1]:.2f}"


def show_device_bench(console: Console, result: dict[str, Any]) -> None:
    """Print the figures of ``bench --device``."""
    console.print(
        f"{escape(result['device'])}: a copy moves {size(result['copy_bytes_per_second'])}/s; "
        f"kernels on {result['elements']:,} elements, steps of {result['parameters']:,} parameters",
        soft_wrap=True,
    )
    moved = [
        (
            row["kernel"],
            f"{row['seconds'] * 1e3:.3f}",
            f"{size(row['bytes_per_second'])}/s",
            f"{row['of_copy']:.2f}",
        )
        for row in result["kernels"]
    ]
    console.print(Table(("kernel", "ms", "throughput", "of copy"), moved))
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
    console.print(Table(("step", "ms", "ps per parameter", "of torch", "bytes per parameter"), stepped))
    ended = [(row["operation"], f"{row['seconds']:.2f}", size(row["bytes"] or 0)) for row in result["files"]]
    console.print(Table(("operation", "seconds", "size"), ended))
