"""The command ``compress``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt8.cli.bases import finding_bases
from ckpt8.cli.compress_ranks import compress_share, ranks
from ckpt8.cli.options import Budget, Device, DryRun, Force, Json, Preset, Remove, Rules, Threads, stopwatch
from ckpt8.cli.output import console, print_json, print_lines, progress_bar, waited
from ckpt8.core.errors import OutputError, UsageError

if TYPE_CHECKING:
    from ckpt8.cli.jobs import Tally


@finding_bases
def compress(
    src: Annotated[
        list[Path], typer.Argument(readable=False, metavar="SRC...", help="Checkpoint files, or directories of them.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write; of several SRC, the folder. Default: next to each."),
    ] = None,
    preset: Preset = None,
    budget: Budget = None,
    rule: Rules = None,
    device: Device = "auto",
    threads: Threads = None,
    max_update_error: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="X",
            help="Keep moments lossless where max |Δu| exceeds X or is unknown. Codes of a budget keep to X.",
        ),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Measure the error while compressing.")] = True,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="OLD",
            help="Store differences to OLD, the .ckpt8 of an earlier step, which the new one then needs. auto chooses "
            "one among those in its folder, where that makes it smaller.",
        ),
    ] = None,
    remove: Remove = False,
    dry_run: DryRun = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compress SRC into a .ckpt8, then show its size and its error.

    torchrun -m ckpt8 compress DIR -o OUT has the ranks share the slices of a directory of torch.distributed.checkpoint;
    OUT becomes a directory with a .ckpt8 of each rank.

    Several SRC become a .ckpt8 each. Where one fails, a message says why and the others go on; the exit code is the
    highest of all failures.
    """
    if remove and not stats:
        raise UsageError("--remove verifies by the statistics of a container; leave out --no-stats")
    options: dict[str, Any] = {
        "preset": preset,
        "budget": budget,
        "rules": rule or (),
        "device": device,
        "threads": threads,
        "stats": stats,
        "max_update_error": max_update_error,
        "base": base,
    }
    if (place := ranks(src)) is not None:
        if remove or dry_run:
            raise UsageError(
                f"{'--remove' if remove else '--dry-run'} is not for ranks that share a source; leave it out"
            )
        compress_share(src[0], output, options, *place, force=force, as_json=as_json)
    elif len(src) == 1 and dry_run:
        _preview_one(src[0], output, options, remove=remove, force=force, as_json=as_json)
    elif len(src) == 1:
        _compress_one(src[0], output, options, remove=remove, force=force, as_json=as_json)
    else:
        _compress_many(src, output, options, remove=remove, force=force, as_json=as_json, dry=dry_run)


def _compress_one(
    src: Path, output: Path | None, options: dict[str, Any], *, remove: bool, force: bool, as_json: bool
) -> None:
    from ckpt8.inspecting.container import inspect_container

    output, target = _targets(src, output)
    finished = _finish_removals(src, target, options, as_json=as_json) if remove else None
    left = finished.to_json() if finished else {}
    rows = left.pop("checkpoints", [])
    if as_json:
        print_json({"finished": rows, **({"error": left["error"]} if "error" in left else {})})
    container = next((Path(row["target"]) for row in rows if row["removed"] and row["source"] == str(src)), None)
    if container is None:
        options = {**options, "force": force}
        seconds, is_there, facts = _compress_now(src, output, target, options, remove=remove, as_json=as_json)
    else:
        target, seconds, is_there, facts = container, 0.0, True, inspect_container(container)
    if as_json:
        print_json({"target": str(target), "seconds": seconds, "present": is_there, "removed": remove, **facts})
    if finished and finished.exit_code:
        raise typer.Exit(finished.exit_code)


def _targets(src: Path, output: Path | None) -> tuple[Path | None, Path]:
    """The target that the user named, in a folder if that was named; and the target."""
    from ckpt8.compressing.compress import default_target

    target = default_target(src)
    if output is not None and os.path.isdir(output):  # noqa: PTH112 - False for a name that is too long
        output = output / target.name
    return output, output or target


def _preview_one(
    src: Path, output: Path | None, options: dict[str, Any], *, remove: bool, force: bool, as_json: bool
) -> None:
    from ckpt8.chaining.jobs import Job, Settings, finishing
    from ckpt8.chaining.several import job_for
    from ckpt8.cli.jobs import run_jobs

    _, target = _targets(src, output)
    if not target.parent.is_dir():
        raise OutputError(f"{target}: cannot be written: {target.parent} is no folder")
    settings = Settings(options, remove)
    left = finishing(src.parent, [target.parent], settings) if remove else []
    if not any(job.source == src for job in left):
        left.append(job_for(src, target, settings, force=force) if remove else Job(src, target, settings, force=force))
    _show_all(run_jobs([left], "compress", quiet=as_json, dry=True), as_json=as_json)


def _compress_now(
    src: Path, output: Path | None, target: Path, options: dict[str, Any], *, remove: bool, as_json: bool
) -> tuple[float, bool, dict[str, Any]]:
    """Compress ``src``, show the result and remove ``src`` if asked to.

    Returns the seconds, whether the container was there already, as it may with ``remove``, and its facts.
    """
    from ckpt8.cli.show.inspect import summary
    from ckpt8.compressing.compress import compress as run
    from ckpt8.inspecting.container import inspect_container

    is_there = False
    if remove:
        from ckpt8.chaining.jobs import Settings
        from ckpt8.chaining.removal import refuse_removal, remove_verified
        from ckpt8.chaining.several import job_for
        from ckpt8.compressing.compressor import no_progress

        refuse_removal(src)
        is_there = job_for(src, target, Settings(options, remove), force=options["force"]).is_done(no_progress)
    elapsed = stopwatch()
    if not is_there:
        with progress_bar(f"compress {src.name}", src, enabled=not as_json) as progress:
            run(src, output, **options, progress=progress)
    seconds = elapsed()
    facts = inspect_container(target)
    if is_there and not as_json:
        print_lines(console(), [f"{target}: was there already"])
    elif not as_json:
        summary(console(), facts, str(target), seconds, waited())
    if remove:
        with progress_bar(f"verify {src.name}", src, src, enabled=not as_json) as progress:
            remove_verified(src, target, threads=options["threads"], progress=progress)
        if not as_json:
            print_lines(console(), [f"{src}: removed, after the container was verified against it"])
    return seconds, is_there, facts


def _finish_removals(src: Path, target: Path, options: dict[str, Any], *, as_json: bool) -> Tally:
    """Finish the removals that killed processes left beside ``src``, and say so."""
    from ckpt8.chaining.jobs import Settings, finishing
    from ckpt8.cli.jobs import run_jobs

    return run_jobs([finishing(src.parent, [target.parent], Settings(options, remove=True))], "finish", quiet=as_json)


def _compress_many(
    sources: list[Path],
    output: Path | None,
    options: dict[str, Any],
    *,
    remove: bool,
    force: bool,
    as_json: bool,
    dry: bool,
) -> None:
    from ckpt8.chaining.jobs import Settings
    from ckpt8.chaining.several import collected
    from ckpt8.cli.jobs import run_jobs

    elapsed = stopwatch()
    with collected(sources, output, Settings(options, remove), force=force, dry=dry) as jobs:
        tally = run_jobs(jobs, "compress", quiet=as_json, dry=dry)
    _show_all(tally, as_json=as_json, seconds=elapsed())


def _show_all(tally: Tally, *, as_json: bool, **facts: float) -> None:
    if as_json:
        print_json({**tally.to_json(), **facts})
    else:
        tally.show_total()
    if tally.exit_code:
        raise typer.Exit(tally.exit_code)
