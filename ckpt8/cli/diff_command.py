"""The command ``diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpt8.cli.options import Json, Threads
from ckpt8.cli.output import present, progress_bar
from ckpt8.core.errors import CheckFailedError


def diff(
    a: Annotated[
        Path, typer.Argument(readable=False, metavar="A", help="A checkpoint file or directory, or a .ckpt8 of one.")
    ],
    b: Annotated[Path, typer.Argument(readable=False, metavar="B", help="Another one, of any of these kinds.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor that both have.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Show what differs between A and B, and by how much. Exit code 0: they are identical. 1: they differ."""
    from ckpt8.cli.show.diff import show
    from ckpt8.inspecting.diff.diff import diff as run

    with progress_bar(f"diff {a.name} {b.name}", a, b, enabled=not as_json) as progress:
        found = run(a, b, threads=threads, progress=progress)
    facts = found.to_json()
    present(facts, lambda console: show(console, facts, tensors=tensors), as_json=as_json)
    if not found.identical:
        raise typer.Exit(CheckFailedError.exit_code)
