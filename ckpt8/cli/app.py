"""The command line: parse, call, render. Exit codes: 0 ok, 1 a check does not hold, 2 usage, 3 input, 4 output."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ckpt8 import __version__
from ckpt8.cli.bench_command import bench
from ckpt8.cli.convert_command import convert
from ckpt8.cli.diff_command import diff
from ckpt8.cli.guard import guarded
from ckpt8.cli.options import Container, Force, Json, Output, Threads, clock, console, print_json
from ckpt8.core.errors import CheckFailedError, UsageError
from ckpt8.core.text import printable, size

app = typer.Typer(
    name="ckpt8",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make training checkpoints about three times smaller; the resumed run does not notice.",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ckpt8 {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def compress(
    src: Annotated[Path, typer.Argument(readable=False, help="A checkpoint file, or a directory of them.")],
    output: Output = None,
    preset: Annotated[str, typer.Option(help="flash, compact or lossless.")] = "flash",
    rule: Annotated[
        list[str] | None, typer.Option(metavar="GLOB=CODEC", help="Override by tensor path; first match wins.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to pack: cpu, or cuda; auto is cpu.")] = "auto",
    threads: Threads = None,
    max_update_error: Annotated[
        float | None,
        typer.Option(min=0, metavar="X", help="Keep moments lossless where max |Δu| exceeds X or is unknown."),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Measure the error while compressing.")] = True,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compress SRC into a .ckpt8 and show the error that was made."""
    from ckpt8.checkpoint.readers.entries import size_of
    from ckpt8.cli.progress_bar import progress_bar
    from ckpt8.cli.show.inspect import summary
    from ckpt8.compressing import compress as api
    from ckpt8.inspecting.container import inspect_container

    target = output or api.default_target(src)
    start = clock()
    with progress_bar(f"compress {src.name}", size_of(src), enabled=not as_json) as progress:
        api.compress(
            src,
            output,
            preset=preset,
            rules=rule or (),
            device=device,
            threads=threads,
            stats=stats,
            max_update_error=max_update_error,
            force=force,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    facts = inspect_container(target)
    if as_json:
        print_json({"target": str(target), "seconds": seconds, **facts})
    else:
        summary(console(), facts, str(target), seconds)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(readable=False, help="A .ckpt8, a checkpoint or a directory.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(readable=False, metavar="ORIGINAL", help="Measure a .ckpt8, with --readiness any copy, from it."),
    ] = None,
    readiness: Annotated[
        bool, typer.Option("--readiness", help="Judge what fp16, bf16, fp8 and int8 would make of it.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Read every element instead of a sample.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report with charts: one page, no network, no script.")
    ] = None,
    drift: Annotated[
        Path | None,
        typer.Option(readable=False, metavar="FILE", help="Show in it what verify --resume-steps N --json printed."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show what a .ckpt8 or a checkpoint is made of, where the bytes are, red flags, and the error that was made.

    Red flags (NaN, dead rows, weights stored twice, what fp16 would lose) are looked for in a sample of a checkpoint,
    and with --full in every element; in a .ckpt8 with --full only. --json has them as flags, with sample and layers.
    """
    from ckpt8.container.header import is_container

    report = None
    if html is not None or drift is not None:
        from ckpt8.cli.show.html.report import report_for

        report = report_for(html, path, original=against, drift=drift, full=full, force=force)
    if is_container(path):
        from ckpt8.inspecting.container import inspect_container

        visit = report.visit if report else None
        facts = inspect_container(path, tensors=tensors, original=against, full=full, visit=visit)
    elif against is not None and not readiness:
        raise UsageError(f"{path}: is not a .ckpt8; --against compares a .ckpt8 with its original")
    else:
        from ckpt8.checkpoint.readers.entries import size_of
        from ckpt8.cli.progress_bar import progress_bar
        from ckpt8.inspecting.checkpoint import inspect_checkpoint

        shown = full and not as_json
        with progress_bar(f"inspect {path.name}", size_of(path) if shown else 0, enabled=shown) as progress:
            facts = inspect_checkpoint(path, tensors=tensors, full=full, progress=progress)
    if readiness:
        from ckpt8.inspecting.readiness.readiness import inspect_readiness

        facts["readiness"] = inspect_readiness(path, full=full, original=against)
    if report is not None:
        report.write(facts)
    if as_json:
        print_json(facts)
    else:
        from ckpt8.cli.show.inspect import show

        show(console(), facts)


@app.command()
def restore(
    src: Container,
    output: Output = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Of a damaged SRC, write what is whole and list the rest.")
    ] = False,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write back the checkpoint that SRC was made from, by default beside SRC and under its name.

    best.ckpt8 gives best.pt, best.safetensors, ... or the directory best/; what the original was called is shown.
    --force replaces checkpoints: a directory only if nothing else is in it, another file only if -o names it.
    """
    from ckpt8.cli.progress_bar import progress_bar
    from ckpt8.container.reader import ContainerReader
    from ckpt8.restoring.restore import restore as run
    from ckpt8.restoring.restore import restore_original

    if salvage:
        found = run(src, output, salvage=True, force=force, threads=threads)
        if as_json:
            print_json(found.to_json())
        else:
            console().print("\n".join(map(printable, found.lines())), markup=False, soft_wrap=True)
        if not found.complete:
            raise CheckFailedError(f"{src}: is damaged; not everything in it was recovered for certain")
        return
    with ContainerReader(src) as reader:
        total = sum(member.size for member in reader.manifest.members)
    start = clock()
    with progress_bar(f"restore {src.name}", total, enabled=not as_json) as progress:
        restored = restore_original(src, output, force=force, threads=threads, progress=progress)
    seconds = time.perf_counter() - start
    if as_json:
        facts = {"original": restored.original, "replaced": restored.replaced}
        print_json({"target": str(restored.path), "bytes": total, "seconds": seconds, **facts})
    else:
        lines = [f"{restored.path}: {size(total)} in {seconds:.2f} s", *restored.lines()]
        console().print("\n".join(map(printable, lines)), markup=False, soft_wrap=True)


@app.command()
def verify(
    src: Container,
    against: Annotated[
        Path | None,
        typer.Option(readable=False, metavar="ORIGINAL", help="Measure all statistics again."),
    ] = None,
    resume_steps: Annotated[
        int, typer.Option(min=0, max=1 << 20, metavar="N", help="Replay N optimizer steps on both and show the drift.")
    ] = 0,
    max_drift: Annotated[
        float | None, typer.Option(min=0, metavar="X", help="Fail where the NMSE of a replayed update exceeds X.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Check every byte of SRC, and with --against every statistic that it states."""
    from dataclasses import asdict

    from ckpt8.checkpoint.readers.entries import size_of
    from ckpt8.cli.progress_bar import progress_bar
    from ckpt8.cli.show.inspect import show_drift
    from ckpt8.core.startup import settle
    from ckpt8.inspecting.verify import verify as run

    settle()
    total = size_of(src) if against is None else 2 * size_of(against)
    with progress_bar(f"verify {src.name}", total, enabled=not as_json) as progress:
        result = run(src, against, resume_steps=resume_steps, max_drift=max_drift, threads=threads, progress=progress)
    if as_json:
        print_json({"path": str(src), **asdict(result)})
    else:
        text = f"{src}: seal and {result.frames:,} frames hold ({size(result.nbytes)})"
        if result.against and not result.failures:
            text += f"; {result.statistics} statistics and all lossless tensors agree with {against}"
            if result.unmeasured:
                text += f"; {result.unmeasured} lossy tensors carry no statistics to check"
        console().print(printable(text), markup=False, soft_wrap=True)
        if result.resume is not None:
            show_drift(console(), result.resume)
    if result.failures:
        more = f" (and {len(result.failures) - 1} more)" if len(result.failures) > 1 else ""
        raise CheckFailedError(f"{src}: {result.failures[0]}{more}")


app.command()(convert)
app.command()(diff)
app.command()(bench)


def main() -> None:
    """Run the command that ``sys.argv`` asks for, see ``guarded``."""
    guarded(app)
