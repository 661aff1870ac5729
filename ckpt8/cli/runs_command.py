"""The command ``runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpt8.cli.options import Force, Json
from ckpt8.cli.output import present
from ckpt8.core.errors import InputError
from ckpt8.core.text import counted


def runs(
    directory: Annotated[Path, typer.Argument(readable=False, metavar="DIR", help="The folder of a run.")],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with sizes and loss by step: no network, no script."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints in DIR and the folders in it, compressed or not, by step: loss, size, base, error, damage.

    It reads the heads of files, no tensors: that a seal and the length hold says nothing about the bytes between, which
    verify checks. Exit code 3: a checkpoint is damaged, or the base of one is missing.
    """
    from ckpt8.cli.show.runs import show
    from ckpt8.inspecting.runs.runs import runs as find

    page = None
    if html is not None:
        from ckpt8.cli.show.html.runs import RunPage

        page = RunPage(html, force=force)
    run = find(directory)
    facts = run.to_json()
    if page is not None:
        page.write(facts)
    present(facts, lambda console: show(console, facts), as_json=as_json)
    if problems := run.problems:
        raise InputError(f"{counted(len(problems), 'checkpoint')} cannot be read whole, the first: {problems[0]}")
