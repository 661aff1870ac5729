"""How commands print their progress and results. Nothing here imports typer, and JSON does not import rich."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt8.core.text import printable

if TYPE_CHECKING:
    from rich.console import Console

_UNWRAPPED = 500


SCHEMA = 1
"""The version of the keys of ``--json``, in all commands: 2 when one of them changes its name or meaning, or goes.

A new key leaves the number as it is. A program that reads the output checks ``schema`` and ignores unknown keys.
"""


stated: dict[str, Any] = {}
"""What the running command states, printed at its end: only then it is known whether it fails, and how long it took."""

_begun: ContextVar[float | None] = ContextVar("_begun", default=None)


def print_json(facts: Mapping[str, Any]) -> None:
    """Have ``facts`` printed as one JSON object on stdout at the end of the command, see ``guard.one_object``."""
    stated.update(facts)


def write_json(facts: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout, with ``schema`` first."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, **facts}, allow_nan=False, ensure_ascii=True) + "\n")


@contextmanager
def waiting() -> Iterator[None]:
    """Start the clock of ``waited``, unless it runs."""
    token = _begun.set(_begun.get() or time.perf_counter())
    try:
        yield
    finally:
        _begun.reset(token)


def waited() -> float:
    """Seconds that a person has waited for the command: from the start of the program on, with all imports.

    Only the start of the interpreter is missing, some hundredths of a second. ``stopwatch`` is for the work alone.
    """
    now = time.perf_counter()
    return now - (_begun.get() or now)


def console() -> Console:
    """The console on stdout. It wraps lines on a terminal only: a log or a pipe gets whole names.

    ``:name:`` stays text and does not become an emoji.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNWRAPPED
    return Console(highlight=False, emoji=False, width=width)


def present(facts: Mapping[str, Any], show: Callable[[Console], object], *, as_json: bool) -> None:
    """Print ``facts`` as JSON, or have ``show`` print them on the console."""
    if as_json:
        print_json(facts)
    else:
        show(console())


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines without markup; escape unprintable characters of names."""
    for line in lines:
        console.print(printable(line), markup=False, soft_wrap=True)


@contextmanager
def progress_bar(
    label: str, *sources: Path, total: int = 0, done: int = 0, enabled: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show throughput and time left; yield a function to call with the number of bytes just done.

    A full bar is ``total`` bytes, or those of ``sources``; ``done`` of them are done already. Silent unless stderr is a
    terminal.
    """
    if not enabled or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from ckpt8.checkpoint.readers.entries import size_of

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(printable(label), total=total or sum(map(size_of, sources)), completed=done)
        yield lambda done: bar.advance(task, done)
