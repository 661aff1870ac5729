"""What the commands share: options, and how results are printed."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

_UNWRAPPED = 500

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Threads = Annotated[int | None, typer.Option(min=1, max=256, help="Worker threads; by default the cores, at most 8.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; by default beside the input.")]
Container = Annotated[Path, typer.Argument(readable=False, metavar="SRC.ckpt8", help="A compressed checkpoint.")]


def print_json(tree: Any) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(tree, allow_nan=False, ensure_ascii=True) + "\n")


def console() -> Console:
    """Where results are shown. Nothing is wrapped where nobody looks: a log or a pipe gets whole names."""
    return Console(
        highlight=False, emoji=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNWRAPPED
    )


def clock() -> float:
    """The time, once torch is there: its import is not what is being measured."""
    import torch  # noqa: F401

    return time.perf_counter()
