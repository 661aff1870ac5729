"""How commands print their results. Nothing here needs the parser, and JSON does not need rich."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    """Where results are shown. Nothing is wrapped where nobody looks: a log or a pipe gets whole names.

    ``:name:`` in a text is that, and no picture.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNWRAPPED
    return Console(highlight=False, emoji=False, width=width)
