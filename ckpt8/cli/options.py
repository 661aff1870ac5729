"""What the commands share: options, the clock, and how results are printed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ckpt8.cli.output import console, print_json

__all__ = ["Container", "Force", "Json", "Output", "Threads", "clock", "console", "print_json"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output: a file, or a checkpoint directory.")]
Threads = Annotated[int | None, typer.Option(min=1, max=256, help="Worker threads; by default the cores, at most 8.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; by default beside the input.")]
Container = Annotated[Path, typer.Argument(readable=False, metavar="SRC.ckpt8", help="A compressed checkpoint.")]


def clock() -> float:
    """The time, once torch is there: its import is not what is being measured."""
    from ckpt8.core.startup import settle

    settle()
    return time.perf_counter()
