"""The option ``--base-dir``, which every command has that opens containers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

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
        [each.replace(annotation=hints[each.name]) for each in parameters], return_annotation=None
    )
    run.__annotations__ = hints
    return run
