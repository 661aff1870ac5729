"""The command ``thin``: the table of what becomes of each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt8.cli.commands import Json, Keep, LeaveReader, Threads, To, finding_bases
from ckpt8.cli.guard import note, present
from ckpt8.core.text import counted, printable_tree, size

if TYPE_CHECKING:
    from rich.console import Console


@finding_bases
def thin(
    directory: Annotated[Path, typer.Argument(readable=False, metavar="DIR", help="The folder of a run.")],
    to: To = None,
    keep: Keep = None,
    apply: Annotated[bool, typer.Option("--apply", help="Do it. Without this option nothing is changed.")] = False,
    finest: Annotated[
        str, typer.Option(metavar="RUNG", help="What is compressed is this fine at most: a preset, or budget:STEPS.")
    ] = "flash",
    coarsest: Annotated[
        str, typer.Option(metavar="RUNG", help="And this coarse at most: a preset, or budget:STEPS.")
    ] = "budget:5",
    protect: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave checkpoints with such names as they are.")
    ] = None,
    delta: Annotated[
        bool, typer.Option("--delta/--no-delta", help="Write deltas where whole files do not fit, or whole files only.")
    ] = True,
    leave_reader: LeaveReader = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Fit a run into a room: compress old checkpoints more, keep fewer. Shows what that would do; --apply does it.

    With --to, old checkpoints become deltas and coarser, from --finest to --coarsest. If that is not enough, the least
    useful ones go. With --keep exactly those go that no rule keeps.

    A new file is verified against the one it was made from before that goes. What is compressed twice states the sum of
    both errors.
    """
    from ckpt8.chaining.thin import thin as run

    done = run(
        directory,
        keep=keep,
        to=to,
        finest=finest,
        coarsest=coarsest,
        protect=protect or (),
        delta=delta,
        leave_reader=leave_reader,
        apply=apply,
        threads=threads,
        tell=note,
    )
    facts = done.to_json()
    present(facts, lambda console: show(console, facts), as_json=as_json)


def show(console: Console, facts: Mapping[str, Any]) -> None:
    """Print ``Thinning.to_json``; escape unprintable characters of names."""
    from ckpt8.cli.show.tables import number, say, show_table

    facts = printable_tree(facts)
    rows = facts["records"]

    def error(steps: float | None) -> str:
        return "unknown" if steps is None else number(steps) if steps else "none"

    columns = {
        "step": ["" if row["step"] is None else f"{row['step']:,}" for row in rows],
        "loss": ["" if row["loss"] is None else number(row["loss"]) for row in rows],
        "now": [size(row["bytes"]) for row in rows],
        "then": [size(row["then"]) if row["becomes"] != "gone" else "" for row in rows],
        "error": [error(row["steps"]) for row in rows],
        "error then": [error(row["steps_then"]) if row["becomes"] != "gone" else "" for row in rows],
        "becomes": [row["becomes"] + (", twice" if row["twice"] else "") for row in rows],
        "base": [row["base"] or "" for row in rows],
    }
    shown = {title: column for title, column in columns.items() if any(column)}
    names = [row["name"] for row in rows]
    show_table(console, ("checkpoint", *shown), list(zip(names, *shown.values(), strict=True)))
    console.print()
    say(console, *lines(facts))


def lines(facts: Mapping[str, Any]) -> list[str]:
    """What the run takes and would take, and what is needed for it."""
    gone, of = len(facts["gone"]), f" of {size(facts['to'])}" if facts["to"] is not None else ""
    stay = counted(len(facts["records"]) - gone, "checkpoint") + (f" stay, {gone:,} go" if gone else "")
    applied = facts["applied"]
    said = [f"{stay}: {size(facts['bytes'])} -> {size(facts['then'])}{of}"]
    if any(row["twice"] for row in facts["records"]):
        said.append("twice: compressed from a lossy file; the errors are added, which is an upper bound")
    if not applied:
        said.append(f"nothing was changed; --apply does it, with {size(facts['needs'])} free on the disk")
    return said
