"""The command ``diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpt8.cli.options import Json, Threads, console, print_json
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
    """Show what is not the same in A and B, and how far apart it is. Exit code 0 if nothing is, 1 if something is."""
    from ckpt8.checkpoint.readers.entries import size_of
    from ckpt8.cli.progress_bar import progress_bar
    from ckpt8.cli.show.diff import show
    from ckpt8.inspecting.diff.diff import diff as run

    total = size_of(a) + size_of(b)
    with progress_bar(f"diff {a.name} {b.name}", total, enabled=not as_json) as progress:
        found = run(a, b, threads=threads, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        show(console(), found.to_json(), tensors=tensors)
    if not found.identical:
        raise typer.Exit(CheckFailedError.exit_code)
