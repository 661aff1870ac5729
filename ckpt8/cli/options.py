"""The options that several commands share, and the clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output: a file, or a checkpoint directory.")]
Threads = Annotated[int | None, typer.Option(min=1, max=256, help="Worker threads. Default: one per core, at most 8.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write. Default: next to the input.")]
Container = Annotated[Path, typer.Argument(readable=False, metavar="SRC.ckpt8", help="A compressed checkpoint.")]


def clock() -> float:
    """Import torch, then read the clock: what a command measures does not include the import."""
    from ckpt8.core.startup import settle

    settle()
    return time.perf_counter()
