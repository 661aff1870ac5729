"""The command ``chain``."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt8.cli.bases import finding_bases
from ckpt8.cli.options import Budget, Device, DryRun, Force, Json, Preset, Remove, Rules, Threads, stopwatch
from ckpt8.cli.output import console, print_json, print_lines
from ckpt8.core.errors import UsageError
from ckpt8.core.text import listed

if TYPE_CHECKING:
    from ckpt8.chaining.chain import ChainRun

_LISTED = 5


@finding_bases
def chain(
    directory: Annotated[Path, typer.Argument(readable=False, metavar="DIR", help="The folder of a run.")],
    preset: Preset = None,
    budget: Budget = None,
    rule: Rules = None,
    delta: Annotated[
        bool, typer.Option("--delta/--no-delta", help="Write deltas where these are smaller, or whole files only.")
    ] = True,
    remove: Remove = False,
    keep_raw: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Leave the checkpoints of the newest N steps as they are, neither compressed nor removed.",
        ),
    ] = 0,
    watch: Annotated[bool, typer.Option("--watch", help="Go on with checkpoints that appear, until Ctrl-C.")] = False,
    rest: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Leave a checkpoint alone until it has not changed for so long."),
    ] = 10.0,
    device: Device = "auto",
    threads: Threads = None,
    dry_run: DryRun = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compress every checkpoint of a run in DIR, oldest first, each beside itself and as a delta where that is smaller.

    Checkpoints that are compressed already are skipped: after a kill, run it again. What is being written is left
    alone. Where one fails, a message says why and the others go on; the exit code is the highest of all failures.
    """
    if watch and dry_run:
        raise UsageError("--dry-run says what would be done now, and --watch goes on for ever; leave out one of them")
    if watch and as_json:
        raise UsageError("--json prints one object at the end, and --watch has none; leave out one of them")
    from ckpt8.chaining.chain import ChainRun, chain_options
    from ckpt8.chaining.jobs import Settings
    from ckpt8.cli.jobs import run_jobs

    settings = Settings(chain_options(preset, budget, rule or (), device, threads, delta=delta), remove)
    run = ChainRun(directory, settings, force=force, keep_raw=keep_raw, watch=watch, rest=rest)
    if watch:
        print_lines(console(), _left_alone(run))
        if not os.path.lexists(directory):
            print_lines(console(), [f"{directory}: is not there yet; waiting for it"])
    elapsed = stopwatch()
    if not dry_run:
        run.keep_bases()
    tally = run_jobs(run.jobs(), "compress", quiet=as_json, dry=dry_run)
    if as_json:
        skipped = [{"path": str(path), "reason": reason} for path, reason in run.skipped().items()]
        facts = {"directory": str(directory), **tally.to_json(), "packed": run.packed(), "skipped": skipped}
        print_json({**facts, "seconds": elapsed()})
    else:
        print_lines(console(), _left_alone(run))
        tally.show_total()
    if tally.exit_code:
        raise typer.Exit(tally.exit_code)


def _left_alone(run: ChainRun) -> list[str]:
    """A line for each reason why something in the folder is left as it is."""
    names = defaultdict[str, list[str]](list)
    for path, reason in run.skipped().items():
        names[reason].append(path.name)
    lines = [f"{listed(found, _LISTED)}: left alone: {reason}" for reason, found in names.items()]
    packed = run.packed()
    return lines + ([f"left as they are, ranks have packed them: {listed(packed, _LISTED)}"] if packed else [])
