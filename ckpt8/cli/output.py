"""How commands print their results. Nothing here needs the parser, and JSON does not need rich."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_UNWRAPPED = 500


def print_json(tree: Any) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(tree, allow_nan=False, ensure_ascii=True) + "\n")


def console() -> Console:
    """Where results are shown. Nothing is wrapped where nobody looks: a log or a pipe gets whole names.

    ``:name:`` in a text is that, and no picture.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNWRAPPED
    return Console(highlight=False, emoji=False, width=width)
