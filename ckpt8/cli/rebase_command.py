"""The command ``rebase``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpt8.cli.bases import finding_bases
from ckpt8.cli.options import Container, Force, Json, Threads, stopwatch
from ckpt8.cli.output import present, print_lines, progress_bar, waited
from ckpt8.core.text import size


@finding_bases
def rebase(
    src: Container,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write. Default: in the place of the input.")
    ] = None,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a delta as a .ckpt8 that needs no base, by default in its own place."""
    from ckpt8.container.opening import open_stored
    from ckpt8.container.rebase import rebase as run

    elapsed = stopwatch()
    with open_stored(src) as stored:
        before, base = stored.size, stored.manifest.base
    with progress_bar(f"rebase {src.name}", src, enabled=not as_json) as progress:
        target = run(src, output, force=force, threads=threads, progress=progress)
    seconds, after = elapsed(), target.stat().st_size if target.is_file() else before
    was = "needed no base" if base is None else f"needs {base.path} no more"
    facts = {"target": str(target), "base": base and base.path, "bytes": before, "stored_bytes": after}
    line = f"{target}: {was}, {size(before)} -> {size(after)} in {waited():.2f} s"
    present({**facts, "seconds": seconds}, lambda console: print_lines(console, [line]), as_json=as_json)
