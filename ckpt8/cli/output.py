"""How commands print their results. Nothing here imports typer, and JSON does not import rich."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ckpt8.core.text import printable

if TYPE_CHECKING:
    from rich.console import Console

_UNWRAPPED = 500


SCHEMA = 1
"""Which keys ``--json`` prints, in all commands: 2 when one of them is renamed, removed or means something else.

A new key leaves the number as it is. A program that reads the output checks ``schema`` and ignores keys that it does
not know.
"""


def print_json(facts: Mapping[str, Any]) -> None:
    """Print ``facts`` as one JSON object on stdout, with ``schema`` first."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, **facts}, allow_nan=False, ensure_ascii=True) + "\n")


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
    """Print lines that may hold names from files: nothing in them is markup or moves the cursor."""
    for line in lines:
        console.print(printable(line), markup=False, soft_wrap=True)
