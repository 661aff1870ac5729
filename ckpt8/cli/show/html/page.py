"""A page that loads nothing and runs nothing. It also holds its facts as JSON, in the element ``ckpt8-report``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.replacing import no_checkpoint
from ckpt8.cli.show.html.style import STYLE
from ckpt8.cli.show.html.text import text
from ckpt8.core.files.atomic import AtomicFile, as_private_as

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Even if a name got through as markup, the browser would neither run nor load anything."""


def document(title: str, sections: Iterable[str], data: dict[str, Any]) -> str:
    """The whole document of ``sections``, with ``data`` in it."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{text(title)} · ckpt8</title><style>{STYLE}</style></head>\n'
        f"<body><main>{''.join(sections)}</main>\n"
        f'<script type="application/json" id="ckpt8-report">{_embedded(data)}</script></body></html>\n'
    )


def _embedded(tree: Any) -> str:
    """JSON in which nothing is markup."""
    plain = json.dumps(tree, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Figures that stand out: the name and the value of each."""
    items = "".join(f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for name, value in pairs)
    return f'<div class="tiles">{items}</div>'


def check_target(target: Path, *, force: bool) -> None:
    """Raise OutputError if a page cannot be written there, or what is there must stay: see ``no_checkpoint``."""
    _output(target, force).close()


def write_page(target: Path, content: str, sources: Iterable[Path], *, force: bool) -> None:
    """Write a page of what ``sources`` hold, which is not more open to others than they are. Raises as above."""
    with as_private_as(*sources), _output(target, force) as output:
        with output.guard():
            output.file.write(content.encode())
        output.publish()


def _output(target: Path, force: bool) -> AtomicFile:
    return AtomicFile(target, force=force, check=no_checkpoint)
