"""The command ``compress``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpt8.cli.options import Force, Json, Output, Threads, stopwatch
from ckpt8.cli.output import present, progress_bar


def compress(
    src: Annotated[Path, typer.Argument(readable=False, help="A checkpoint file, or a directory of them.")],
    output: Output = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="flash, compact (smaller), archive (smallest) or lossless (bit-exact). Default: flash. compact is a "
            "budget of 0.15, archive of 1.",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="STEPS",
            help="Instead of a preset: the error in optimizer steps, from 0.01 to 10. At 1, weights and moments differ "
            "from SRC as much as one step of training changes them.",
        ),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB=CODEC", help="Store tensors whose path matches GLOB with CODEC. The first match wins."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Pack on the cpu or on cuda. auto is the cpu.")] = "auto",
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
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compress SRC into a .ckpt8, then show its size and its error."""
    from ckpt8.cli.show.inspect import summary
    from ckpt8.compressing import compress as api
    from ckpt8.inspecting.container import inspect_container

    target = output or api.default_target(src)
    elapsed = stopwatch()
    with progress_bar(f"compress {src.name}", src, enabled=not as_json) as progress:
        api.compress(
            src,
            output,
            preset=preset,
            budget=budget,
            rules=rule or (),
            device=device,
            threads=threads,
            stats=stats,
            max_update_error=max_update_error,
            force=force,
            progress=progress,
        )
    seconds = elapsed()
    facts = inspect_container(target)
    present(
        {"target": str(target), "seconds": seconds, **facts},
        lambda console: summary(console, facts, str(target), seconds),
        as_json=as_json,
    )
