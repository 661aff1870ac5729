"""The command ``convert``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckpt8.cli.bases import finding_bases
from ckpt8.cli.options import Force, Json, Threads, stopwatch
from ckpt8.cli.output import present, progress_bar, waited
from ckpt8.core.text import printable

_FORMATS = "torch, safetensors, trainer, dcp, flashoptim, compressed-tensors or ckpt8"
"""The keys of ``converting.writers.WRITERS``, which ``--help`` need not import."""


@finding_bases
def convert(
    src: Annotated[Path, typer.Argument(readable=False, help="A checkpoint file or directory, or a .ckpt8 of one.")],
    dst: Annotated[str, typer.Argument(readable=False, help="The file or directory to write.")],
    to: Annotated[
        str | None, typer.Option("--to", metavar="FORMAT", help=f"{_FORMATS}. Default: what DST's name says.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="Type of the weights: float32, bfloat16, float16. Default: as they are; safetensors get fp32 as bf16. "
            "float8_e4m3fn and int8 quantise linear layers and write a directory for inference.",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(metavar="S", help="Scales of quantised weights: absmax, or unit (powers of two, float8)."),
    ] = None,
    per: Annotated[
        str | None,
        typer.Option(
            metavar="P", help="A scale for each channel (a row; default of float8) or tensor (default of int8)."
        ),
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Modules that stay bf16, like embeddings and head.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(readable=False, metavar="FILE", help="The model's config.json, if SRC has none.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Which model, if SRC holds several: ema, state_dict_ema. torch and dcp write that model alone.",
        ),
    ] = None,
    member: Annotated[
        str | None, typer.Option(metavar="M", help="Which file of a directory, or which folder with a DCP.")
    ] = None,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write SRC in another format: a .pt, safetensors that transformers loads, a Trainer or DCP directory, a .ckpt8."""
    from ckpt8.cli.show.convert import show
    from ckpt8.converting.convert import convert as run

    elapsed = stopwatch()
    with progress_bar(f"convert {src.name}", src, enabled=not as_json) as progress:
        report = run(
            src,
            dst,
            to=to,
            dtype=dtype,
            key=key,
            member=member,
            scale=scale,
            per=per,
            keep=keep or (),
            config=config,
            force=force,
            threads=threads,
            progress=progress,
        )
    facts = {**report.to_json(), "seconds": elapsed()}
    present(facts, lambda console: show(console, report, waited()), as_json=as_json)
    if report.warning is not None:
        sys.stderr.write(f"ckpt8: {printable(report.warning)}\n")
