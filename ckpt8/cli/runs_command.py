"""The command ``runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpt8.cli.bases import finding_bases
from ckpt8.cli.options import Force, Json
from ckpt8.cli.output import present, print_lines
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.text import counted, size


@finding_bases
def runs(
    directory: Annotated[Path, typer.Argument(readable=False, metavar="DIR", help="The folder of a run.")],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with sizes and loss by step: no network, no script."),
    ] = None,
    release: Annotated[
        bool,
        typer.Option("--release", help="List nothing; free the room in bases/ of what no container needs."),
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints in DIR and the folders in it, compressed or not, by step: loss, size, base, error, damage.

    It reads the heads of files, no tensors: that a seal and the length hold says nothing about the bytes between, which
    verify checks. Exit code 3: a checkpoint is damaged, or the base of one is missing.
    """
    if release:
        if html is not None:
            raise UsageError("--release lists nothing; leave out --html")
        _release(directory, as_json=as_json)
        return
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


def _release(directory: Path, *, as_json: bool) -> None:
    from ckpt8.container.kept_bases import release
    from ckpt8.inspecting.runs.finding import find

    found = [release(folder) for folder in dict.fromkeys(path.parent.parent for path in find(directory).bases)]
    freed, left = (sum(each) for each in zip(*found, strict=True)) if found else (0, 0)
    stays = f"; {size(left)} stay in bases/, since deltas need them; ckpt8 rebase makes a delta whole" if left else ""
    facts = {"path": str(directory), "freed_bytes": freed, "bases_bytes": left}
    lines = [f"{directory}: {size(freed)} freed{stays}"]
    present(facts, lambda console: print_lines(console, lines), as_json=as_json)
