"""The command ``bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckpt8.cli.options import Json, Threads
from ckpt8.cli.output import present
from ckpt8.core.errors import UsageError
from ckpt8.core.text import printable

_MOST_RANKS = 64
_SIZES = "0.25GB,0.5GB,1GB,2GB,4GB,8GB"


def bench(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(readable=False, help="A checkpoint file or directory. Without one, bench trains a GPT."),
    ] = None,
    train_size: Annotated[
        str, typer.Option("--size", metavar="BYTES", help="Size of the checkpoint to train, as in 1.5GB.")
    ] = "0.25GB",
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Also measure several numbers of threads and several sizes.")
    ] = False,
    sizes: Annotated[
        str, typer.Option(metavar="BYTES,...", help="With --scaling: the sizes. bench skips those that do not fit.")
    ] = _SIZES,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_RANKS,
            help="Save and load a sharded state with so many processes, beside torch.distributed.checkpoint.",
        ),
    ] = None,
    scratch: Annotated[
        Path | None,
        typer.Option(
            readable=False, metavar="DIR", help="A folder on the disk to measure. Default: the one for temporary files."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu measures files, cuda kernels and optimizer steps.")] = "cpu",
    parameters: Annotated[int, typer.Option(min=1, help="With cuda: how many parameters a step updates.")] = 1 << 30,
    threads: Threads = None,
    repeat: Annotated[int, typer.Option(min=1, help="How many rounds to time. bench reports medians.")] = 3,
    as_json: Json = False,
) -> None:
    """Compare time, size and memory with cp, zstd and torch; on a GPU, kernels and steps with a copy and torch."""
    from ckpt8.cli.bench.sizes import parse_size
    from ckpt8.cli.show.bench import show_bench, show_device_bench
    from ckpt8.core.gpu import requested

    if ranks is not None:
        if checkpoint is not None or scaling or device != "cpu":
            raise UsageError("--ranks trains a state on the CPU; leave out a checkpoint, --scaling and --device")
        _bench_ranks(ranks, parse_size(train_size, "--size"), threads, repeat, scratch, as_json=as_json)
        return
    where = requested(device)
    if where is not None and where.type != "cpu":
        from ckpt8.cli.bench.device import bench_device

        measured = bench_device(where, parameters=parameters)
        present(measured, lambda console: show_device_bench(console, measured), as_json=as_json)
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
    present(result, lambda console: show_bench(console, result), as_json=as_json)


def _bench_ranks(
    ranks: int, size: int, threads: int | None, repeat: int, scratch: Path | None, *, as_json: bool
) -> None:
    from ckpt8.cli.bench.ranks import bench_ranks
    from ckpt8.cli.show.bench import show_ranks

    try:
        result = bench_ranks(ranks, size=size, threads=threads, repeat=repeat, scratch=scratch, say=_say)
    finally:
        _say("")
    present(result, lambda console: show_ranks(console, result), as_json=as_json)


def _say(text: str) -> None:
    """Show the current operation on one line of a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{printable(text)}")
        sys.stderr.flush()
