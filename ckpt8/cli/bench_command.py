"""The command ``bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckpt8.cli.options import Json, Threads, console, print_json
from ckpt8.core.text import printable

_SIZES = "0.25GB,0.5GB,1GB,2GB,4GB,8GB"


def bench(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(readable=False, help="A checkpoint, a file or a directory; without one, a GPT is trained."),
    ] = None,
    train_size: Annotated[
        str, typer.Option("--size", metavar="BYTES", help="Size of the checkpoint to train, as in 1.5GB.")
    ] = "0.25GB",
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Measure over numbers of threads and over sizes as well.")
    ] = False,
    sizes: Annotated[
        str, typer.Option(metavar="BYTES,...", help="With --scaling: the sizes; those without room are left out.")
    ] = _SIZES,
    scratch: Annotated[
        Path | None,
        typer.Option(readable=False, metavar="DIR", help="The disk to measure; by default that of temporary files."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu: files; cuda: kernels and optimizer steps.")] = "cpu",
    parameters: Annotated[int, typer.Option(min=1, help="With cuda: parameters that a step updates.")] = 1 << 30,
    threads: Threads = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds that are timed; medians are reported.")] = 3,
    as_json: Json = False,
) -> None:
    """Measure time, size and memory beside cp, zstd and torch; on a GPU, kernels and steps beside a copy and torch."""
    from ckpt8.cli.bench.sizes import parse_size
    from ckpt8.cli.show.bench import show_bench, show_device_bench
    from ckpt8.core.gpu import requested

    where = requested(device)
    if where is not None and where.type != "cpu":
        from ckpt8.cli.bench.device import bench_device

        measured = bench_device(where, parameters=parameters)
        if as_json:
            print_json(measured)
        else:
            show_device_bench(console(), measured)
        return
    from ckpt8.cli.bench.run import bench as run

    try:
        result = run(
            checkpoint,
            size=parse_size(train_size, "--size"),
            sizes=[parse_size(size, "--sizes") for size in sizes.split(",")] if scaling else [],
            threads=threads,
            repeat=repeat,
            scratch=scratch,
            say=_say,
        )
    finally:
        _say("")
    if as_json:
        print_json(result)
    else:
        show_bench(console(), result)


def _say(text: str) -> None:
    """What is going on, on one line of a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{printable(text)}")
        sys.stderr.flush()
