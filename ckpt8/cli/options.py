"""The options that several commands share, and their stopwatch.

Every command that opens containers has ``--base-dir``.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output: a file, or a checkpoint directory.")]
Threads = Annotated[int | None, typer.Option(min=1, max=256, help="Worker threads. Default: one per core, at most 8.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write. Default: next to the input.")]
Container = Annotated[Path, typer.Argument(readable=False, metavar="SRC.ckpt8", help="A compressed checkpoint.")]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="flash, compact (smaller), archive (smallest) or lossless (bit-exact). Default: flash. compact is a "
        "budget of 0.15, archive of 1.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        metavar="STEPS",
        help="Instead of a preset: the error in optimizer steps, from 0.01 to 10. At 1, weights and moments differ "
        "from SRC as much as one step of training changes them.",
    ),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB=CODEC", help="Store tensors whose path matches GLOB with CODEC. The first match wins."),
]
Device = Annotated[str, typer.Option(help="Pack on the cpu or on cuda. auto is the cpu.")]
Remove = Annotated[
    bool,
    typer.Option("--remove", help="Remove a checkpoint once its container was verified against it, never otherwise."),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say what would be written, its predicted size, and what would be removed. Write nothing."
    ),
]


def stopwatch() -> Callable[[], float]:
    """Import torch, then start: the seconds since then, without the import, are the result of the function."""
    from ckpt8.core.workers import settle

    settle()
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


_NAME = "base_dir"
_BaseDirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--base-dir",
        readable=False,
        metavar="DIR",
        envvar="CKPT8_BASE_DIR",
        help="Look for the base of a delta in DIR, too. Also several times.",
    ),
]


def finding_bases(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with the option ``--base-dir``, which holds for every container that it opens."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        from ckpt8.container.bases import looked_for_in

        with looked_for_in(options.pop(_NAME, None) or ()):
            command(*args, **options)

    # Resolved here: names in the annotations of ``command`` are those of its module.
    hints = {**get_type_hints(command, include_extras=True), _NAME: _BaseDirs}
    option = inspect.Parameter(_NAME, inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [*inspect.signature(command).parameters.values(), option]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters], return_annotation=None
    )
    run.__annotations__ = hints
    return run
