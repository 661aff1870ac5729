"""The commands on a whole run: ``chain``, ``thin`` and ``runs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt8.cli.commands import (
    LISTED,
    Budget,
    Device,
    DryRun,
    Force,
    FrozenFrom,
    Json,
    Preset,
    Remove,
    Rules,
    Threads,
    end,
    finding_bases,
    stopwatch,
)
from ckpt8.cli.guard import console, note, present, print_lines
from ckpt8.core.errors import InputError, UsageError, require
from ckpt8.core.files.paths import as_path
from ckpt8.core.grouping import grouped
from ckpt8.core.text import counted, listed, printable_tree, size

if TYPE_CHECKING:
    from rich.console import Console

Keep = Annotated[
    str | None,
    typer.Option(
        metavar="RULES",
        help="Which checkpoints stay: last:N, best:N (by the framework's metric, else the loss), every:STEPS, log "
        "(ever fewer towards the past), with commas between. Rules add up.",
    ),
]
To = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The room that the run may take, as in 50GB: old checkpoints get coarser."),
]
LeaveReader = Annotated[
    bool, typer.Option("--leave-reader", help="Put read_ckpt8.py into DIR, which reads every .ckpt8 without ckpt8.")
]


@finding_bases
def chain(
    directory: Annotated[Path, typer.Argument(readable=False, metavar="DIR", help="The folder of a run.")],
    preset: Preset = None,
    budget: Budget = None,
    rule: Rules = None,
    delta: Annotated[
        bool, typer.Option("--delta/--no-delta", help="Write deltas if they are smaller, or whole files only.")
    ] = True,
    frozen_from: FrozenFrom = None,
    remove: Remove = False,
    keep_raw: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Leave the checkpoints of the newest N steps as they are, neither compressed nor removed.",
        ),
    ] = 0,
    watch: Annotated[bool, typer.Option("--watch", help="Then wait for new checkpoints, until Ctrl-C.")] = False,
    rest: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Leave a checkpoint alone until it has not changed for so long."),
    ] = 10.0,
    keep: Keep = None,
    to: To = None,
    leave_reader: LeaveReader = False,
    device: Device = "auto",
    threads: Threads = None,
    dry_run: DryRun = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compress every checkpoint of a run in DIR, oldest first, each next to itself, as a delta if that is smaller.

    It skips checkpoints that are compressed already: after a kill, run it again. It leaves unfinished ones alone. If
    one fails, a message says why and the others go on; the exit code is the highest of all failures.
    """
    require(
        not (watch and dry_run),
        "--dry-run says what would be done now, and --watch never ends; leave out one of them",
        UsageError,
    )
    require(
        not (watch and as_json),
        "--json prints one object at the end, and --watch has none; leave out one of them",
        UsageError,
    )
    from ckpt8.chaining.chain import ChainRun, chain_options, is_there
    from ckpt8.chaining.jobs import Settings
    from ckpt8.chaining.thin import upkeep
    from ckpt8.cli.jobs import run_jobs

    directory = as_path(directory)
    thins = upkeep(keep, to, delta=delta, threads=threads)
    if thins is not None:
        require(not dry_run, "--dry-run does not foresee --keep and --to; see ckpt8 thin", UsageError)
    settings = Settings(chain_options(preset, budget, rule or (), device, threads, frozen_from, delta=delta), remove)
    run = ChainRun(
        directory,
        settings,
        force=force,
        keep_raw=keep_raw,
        watch=watch,
        rest=rest,
        leave_reader=leave_reader and not dry_run,
        upkeep=thins,
        tell=note,
    )
    if watch:
        absent = [] if is_there(directory) else [f"{directory}: is not there yet; waiting for it"]
        print_lines(console(), [*_left_alone(run.skipped(), run.packed()), *absent])
    elapsed = stopwatch()
    if not dry_run:
        run.keep_bases()
    tally = run_jobs(run.jobs(), "compress", quiet=as_json, dry=dry_run)
    skipped, packed = run.skipped(), run.packed()
    if not as_json:
        print_lines(console(), _left_alone(skipped, packed))
    facts = {
        "directory": str(directory),
        **tally.to_json(),
        "packed": packed,
        "skipped": [{"path": str(path), "reason": reason} for path, reason in skipped.items()],
        "seconds": elapsed(),
    }
    end(tally, facts, as_json=as_json)


def _left_alone(skipped: Mapping[Path, str], packed: Sequence[str]) -> list[str]:
    """A line for each reason why something in the folder is left as it is."""
    return [
        *(
            f"{listed(names, LISTED)}: left alone: {reason}"
            for reason, names in grouped((reason, path.name) for path, reason in skipped.items()).items()
        ),
        *([f"left as they are, ranks have packed them: {listed(packed, LISTED)}"] if packed else []),
    ]


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

    A new file is verified against the one it was made from before that goes, an original as well. What is compressed
    twice states the sum of both errors. DIR may be s3://BUCKET/run.
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
    present(facts, lambda console: show_thinning(console, facts), as_json=as_json)
    if problems := done.problems:
        stay = f"{counted(len(problems), 'checkpoint')} cannot be read whole and stay as they are"
        raise InputError(f"{stay}, the first: {problems[0]}")


def show_thinning(console: Console, facts: Mapping[str, Any]) -> None:
    """Print ``Thinning.to_json``; escape unprintable characters of names."""
    from ckpt8.cli.show.tables import number, say, show_table

    facts = printable_tree(facts)
    rows = facts["records"]

    def error(steps: float | None) -> str:
        return "unknown" if steps is None else number(steps) if steps else "none"

    columns = [
        ("step", ["" if row["step"] is None else f"{row['step']:,}" for row in rows]),
        (facts["metric"], ["" if row["score"] is None else number(row["score"]) for row in rows]),
        ("now", [size(row["bytes"]) for row in rows]),
        ("then", [size(row["then"]) if row["becomes"] != "gone" else "" for row in rows]),
        ("error", [error(row["steps"]) for row in rows]),
        ("error then", [error(row["steps_then"]) if row["becomes"] != "gone" else "" for row in rows]),
        ("becomes", [row["becomes"] + (", twice" if row["twice"] else "") for row in rows]),
        ("base", [row["base"] or "" for row in rows]),
    ]
    shown = [(title, column) for title, column in columns if any(column)]
    names = [row["name"] for row in rows]
    show_table(
        console,
        ("checkpoint", *(title for title, _ in shown)),
        list(zip(names, *(column for _, column in shown), strict=True)),
    )
    console.print()
    say(console, *_thinning_lines(facts))


def _thinning_lines(facts: Mapping[str, Any]) -> list[str]:
    """What the run takes and would take, and what is needed for it."""
    gone, of = len(facts["gone"]), f" of {size(facts['to'])}" if facts["to"] is not None else ""
    stay = counted(len(facts["records"]) - gone, "checkpoint") + (f" stay, {gone:,} go" if gone else "")
    applied, held = facts["applied"], ((row["held"], row["name"]) for row in facts["records"] if row["held"])
    said = [f"{stay}: {size(facts['bytes'])} -> {size(facts['then'])}{of}"]
    if originals := sum(row["drops_original"] for row in facts["records"]):
        removed = f"{counted(originals, 'original')} {'removed' if applied else 'to be removed'}"
        said.append(f"{removed}, each once its .ckpt8 was verified against it")
    if facts["metric"] not in ("loss", "val. loss"):
        said.append(f"best is the {'highest' if facts['is_highest'] else 'lowest'} {facts['metric']}, as recorded")
    said += [f"{listed(names, LISTED)}: stays as it is: {why}" for why, names in grouped(held).items()]
    if any(row["twice"] for row in facts["records"]):
        said.append("twice: compressed from a lossy file; the errors are added, which is an upper bound")
    if not applied:
        room = f"{size(facts['needs'])} free in {facts['needs_in']}"
        said.append(f"nothing was changed; --apply does it, and needs {room}")
    return said


@finding_bases
def runs(
    directory: Annotated[Path, typer.Argument(readable=False, metavar="DIR", help="The folder of a run.")],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with sizes and loss by step: no network, no script."),
    ] = None,
    release: Annotated[
        bool,
        typer.Option("--release", help="List nothing; free the space in bases/ that no container needs."),
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints in DIR and the folders in it, compressed or not, by step: loss, size, base, error, damage.

    It reads the heads of files, no tensors. sealed means that header, manifest and length are intact; verify checks the
    bytes between. Exit code 3: a checkpoint is damaged, or the base of one is missing.
    """
    if release:
        require(html is None, "--release lists nothing; leave out --html", UsageError)
        _release(directory, as_json=as_json)
        return
    from ckpt8.chaining.keeping import Keep as Keeping
    from ckpt8.cli.show.charts import Page
    from ckpt8.cli.show.runs import page, show
    from ckpt8.inspecting.runs import runs as find

    if html is not None:
        output = Page(html, force=force)
    run = find(directory)
    stay = [list(run)[index] for index in Keeping(log=True).kept(list(run))]
    facts = {
        **run.to_json(),
        "keep_log": {"stay": len(stay), "bytes": sum(record.stored_bytes + record.raw_bytes for record in stay)},
    }
    if html is not None:
        output.write(page(facts), [directory])
    present(facts, lambda console: show(console, facts), as_json=as_json)
    if html is not None and not as_json:
        print_lines(console(), [f"{html}: is written; open it in a browser"])
    if problems := run.problems:
        raise InputError(f"{counted(len(problems), 'checkpoint')} cannot be read whole, the first: {problems[0]}")


def _release(directory: Path, *, as_json: bool) -> None:
    from ckpt8.container.kept_bases import release
    from ckpt8.core.files.source_file import refuse_url
    from ckpt8.inspecting.runs import find

    refuse_url(directory)
    releases = [release(folder) for folder in dict.fromkeys(path.parent.parent for path in find(directory).bases)]
    freed, left = (sum(amounts) for amounts in zip(*releases, strict=True)) if releases else (0, 0)
    stays = f"; {size(left)} stay in bases/, since deltas need them; ckpt8 rebase makes a delta whole" if left else ""
    present(
        {"path": str(directory), "freed_bytes": freed, "bases_bytes": left},
        lambda console: print_lines(console, [f"{directory}: {size(freed)} freed{stays}"]),
        as_json=as_json,
    )
